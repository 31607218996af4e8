"""How a model family marks its reasoning, which comes before the answer."""

from dataclasses import dataclass
from enum import Enum, auto


class Thinks(Enum):
    """Where an answer begins, relative to its reasoning."""

    OPEN = auto()  # inside: the prompt has opened it
    WITHIN = auto()  # inside: the client has begun it, and the model goes on
    MAYBE = auto()  # before: the model may open it
    NO = auto()  # after, or in an answer that is continued

    @property
    def inside(self) -> bool:
        """Whether the answer begins in its reasoning."""
        return self in (Thinks.OPEN, Thinks.WITHIN)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning is text between `open` and `close`. `signs` are texts of a chat template whose model reasons
    this way.

    A model that writes messages may do so several times, with `joint` after each. Text between `aside` and
    `close` is for the reader, and `text` opens the answer itself. Any message begins with a header, which
    stands between `header[0]` and `header[1]` and begins with the channel's name; a recipient may stand
    before it.
    """

    name: str
    signs: tuple[str, ...]
    open: str
    close: str
    joint: str = ""
    aside: str = ""
    text: str = ""
    header: tuple[str, str] | None = None

    @property
    def texts(self) -> str:
        """All the texts of the format. Special tokens outside of them do not matter."""
        return " ".join((self.open, self.close, self.joint, self.aside, self.text))

    def thinks(self, prompt: str) -> Thinks:
        """Where the answer begins after a rendered prompt."""
        end = prompt.rstrip()
        if end.endswith(self.open):
            return Thinks.OPEN
        return Thinks.NO if end.endswith(self.close) else Thinks.MAYBE

    def channel(self, words: str) -> str:
        """The text that opens a message of the channel which a header's words name: `open`, `aside`, or
        `text` for any other channel, and for calls."""
        assert self.header is not None
        begin, end = self.header
        name, *others = words.split() or [""]
        known = set() if any(word.startswith("to=") for word in others) else {self.open, self.aside}
        opener = f"{begin}{name}{end}"
        return opener if opener in known else self.text

    def begins(self, text: str) -> bool:
        """Whether an answer that begins with `text` begins with its reasoning."""
        return text.lstrip().startswith(self.open)

    def continues(self, text: str) -> bool:
        """Whether an answer that begins with `text` is still in its reasoning."""
        return self.begins(text) and text.rfind(self.open) > text.rfind(self.close)
