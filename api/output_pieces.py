"""A choice's output as pieces in order. Adjacent text is joined."""

from collections.abc import Iterable
from copy import copy
from typing import NamedTuple

import msgspec

from personae.engine.sequence import TokenLogprobs


class TokenEntry(NamedTuple):
    """A token with its logprobs (None: nothing comes before it) and the place in the choice's text where it
    begins."""

    token: int
    logprobs: TokenLogprobs | None
    offset: int


class Span(msgspec.Struct):
    """Text for the reader, or reasoning. `entries` are those of the text's tokens, if they were requested."""

    text: str
    reasoning: bool = False
    entries: list[TokenEntry] = []


class CallPart(msgspec.Struct):
    """What a tool call gained: its id and name when it begins; then JSON text of its arguments.

    `custom`: this is a custom tool, and `arguments` is its input.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    custom: bool = False


class CallOutcome(msgspec.Struct):
    """What a call answered that the server made itself: its `output`, or else the `error`. `code` is that of
    a failed protocol; None if the tool says that it failed. `id` is the call's."""

    id: str
    output: str | None
    error: str = ""
    code: int | None = None


class OutputPieces(msgspec.Struct):
    """Adjacent pieces of one kind are joined, so the pieces do not depend on how the text was divided."""

    pieces: list[Span | CallPart | CallOutcome] = []

    @property
    def text(self) -> str:
        """The text for the reader."""
        if len(self.pieces) == 1 and isinstance(only := self.pieces[0], Span) and not only.reasoning:
            return only.text  # of most tokens of most answers
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
        """Add text."""
        if not text:
            return
        last = self.pieces[-1] if self.pieces else None
        if isinstance(last, Span) and last.reasoning == reasoning:
            last.text += text
        else:
            self.pieces.append(Span(text, reasoning))

    def call(self, part: CallPart) -> None:
        """Add what a call gained."""
        self._take(part)

    def add(self, later: "OutputPieces") -> None:
        """Add later pieces."""
        for piece in later.pieces:
            self._take(piece)

    def credit(self, entries: list[TokenEntry]) -> bool:
        """Give the first text the entries of its tokens; False if there is none."""
        for span in self._spans():
            if not span.reasoning:
                span.entries += entries
                return True
        return False

    def _take(self, piece: Span | CallPart | CallOutcome) -> None:
        last = self.pieces[-1] if self.pieces else None
        match last, piece:
            case Span(), Span() if last.reasoning == piece.reasoning:
                last.text += piece.text
                last.entries += piece.entries
            case CallPart(), CallPart() if last.index == piece.index:
                last.arguments += piece.arguments
            case _, Span():  # a copy, because it will grow
                self.pieces.append(Span(piece.text, piece.reasoning, [*piece.entries]))
            case _:
                self.pieces.append(copy(piece))

    def _spans(self) -> Iterable[Span]:
        return (piece for piece in self.pieces if isinstance(piece, Span))
