"""A choice's output, piece by piece in its order. Adjacent text is joined."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from personae.engine.sequence import TokenLogprobs


class TokenEntry(NamedTuple):
    """A token with its logprobs (None: nothing comes before it) and where it begins in the choice's text."""

    token: int
    logprobs: TokenLogprobs | None
    offset: int


@dataclass(slots=True)
class Span:
    """Text for the reader, or reasoning. `entries` are those of the text's tokens, if they were asked for."""

    text: str
    reasoning: bool = False
    entries: list[TokenEntry] = field(default_factory=list)


@dataclass(slots=True)
class CallPart:
    """What a tool call gained: its id and name, once, when it begins; then JSON text of its arguments.

    `custom`: the tool is one of text, and `arguments` its input.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    custom: bool = False


class OutputPieces:
    """Neighbours of one kind are one piece, so that the pieces do not depend on how the words came."""

    def __init__(self, pieces: Iterable[Span | CallPart] = ()) -> None:
        self.pieces: list[Span | CallPart] = []
        for piece in pieces:
            self._take(piece)

    def __bool__(self) -> bool:
        return bool(self.pieces)

    @property
    def text(self) -> str:
        """The text for the reader."""
        return "".join(span.text for span in self._spans() if not span.reasoning)

    @property
    def reasoning(self) -> str:
        """The reasoning."""
        return "".join(span.text for span in self._spans() if span.reasoning)

    @property
    def calls(self) -> list[CallPart]:
        """The tool calls' increments."""
        return [piece for piece in self.pieces if isinstance(piece, CallPart)]

    def say(self, text: str, *, reasoning: bool = False) -> None:
        """Take in text that came after this."""
        if text:
            self._take(Span(text, reasoning))

    def call(self, part: CallPart) -> None:
        """Take in what a call gained after this."""
        self._take(part)

    def add(self, later: "OutputPieces") -> None:
        """Take in what was said after this."""
        for piece in later.pieces:
            self._take(piece)

    def credit(self, entries: list[TokenEntry]) -> bool:
        """Give the first text the entries of its tokens; False if there is none."""
        span = next((span for span in self._spans() if not span.reasoning), None)
        if span is not None:
            span.entries += entries
        return span is not None

    def _take(self, piece: Span | CallPart) -> None:
        last = self.pieces[-1] if self.pieces else None
        match last, piece:
            case Span(), Span() if last.reasoning == piece.reasoning:
                last.text += piece.text
                last.entries += piece.entries
            case CallPart(), CallPart() if last.index == piece.index:
                last.arguments += piece.arguments
            case _, Span():  # a copy, since it will grow
                self.pieces.append(replace(piece, entries=[*piece.entries]))
            case _:
                self.pieces.append(replace(piece))

    def _spans(self) -> Iterable[Span]:
        return (piece for piece in self.pieces if isinstance(piece, Span))
