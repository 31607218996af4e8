"""How a model family marks its reasoning, which comes before the answer."""

from dataclasses import dataclass
from enum import Enum, auto


class Thinks(Enum):
    """Where an answer begins, seen from its reasoning."""

    OPEN = auto()  # within it: the prompt has opened it
    MAYBE = auto()  # before it: the model may open it
    NO = auto()  # after it, or in an answer that is continued


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning is text between `open` and `close`. `signs` are what a chat template contains if its model
    reasons this way.

    A model that writes messages may do so several times, with `joint` after each. Between `aside` and `close`
    it then says something to the reader, and `text` opens the answer itself.
    """

    name: str
    signs: tuple[str, ...]
    open: str
    close: str
    joint: str = ""
    aside: str = ""
    text: str = ""

    @property
    def texts(self) -> str:
        """All the texts: what a special token has to occur in to matter."""
        return " ".join((self.open, self.close, self.joint, self.aside, self.text))

    def thinks(self, prompt: str) -> Thinks:
        """What the end of a rendered prompt leaves to the answer."""
        end = prompt.rstrip()
        if end.endswith(self.open):
            return Thinks.OPEN
        return Thinks.NO if end.endswith(self.close) else Thinks.MAYBE
