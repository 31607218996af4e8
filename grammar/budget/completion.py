"""Completions, and how they change as an answer continues."""

import re
from bisect import bisect_left
from typing import NamedTuple

from personae.grammar.budget.table import END, LONG, STOP, Piece, Step, TokenTable, follow

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*(?:"|$)', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")


class PlannedCompletion(NamedTuple):
    """A completion, as a piece and as the tokens that write it."""

    piece: Piece
    tokens: tuple[int, ...]


class CompletionPath:
    """A completion that is being written: what is left of it, and from each place on the fewest tokens that
    write the rest. `count` tokens are left. `first` is the next token, or None at the end."""

    __slots__ = ("_at", "_steps", "_whole", "count", "first", "length")

    def __init__(self, whole: Piece, steps: list[Step | None], at: int, step: Step) -> None:
        self._whole, self._steps, self._at = whole, steps, at
        self.count, self.length = step[0], step[2]
        self.first = step[1] if step[0] else None

    @property
    def piece(self) -> Piece:
        """What is left."""
        return self._whole[self._at :]

    @property
    def tokens(self) -> list[int]:
        """The fewest tokens that write it."""
        return follow(self._steps, self._at) or []

    def begins(self, most: int) -> bytes:
        """The next bytes, up to a special token."""
        piece = self._whole[self._at : self._at + most]
        try:
            return bytes(piece)
        except ValueError:
            end = next(at for at, byte in enumerate(piece) if byte >= STOP)
            return bytes(piece[:end])

    def after(self, length: int) -> "CompletionPath | None":
        """What is left after `length` more elements are written. None if no token begins there, or, for a
        very long completion, if that is not known."""
        at = self._at + length
        step = self._steps[at] if at < len(self._steps) else None
        return None if step is None else CompletionPath(self._whole, self._steps, at, step)

    def shared(self, piece: Piece) -> tuple[int, list[Step | None]]:
        """How many elements at its end `piece` shares with this completion, and the steps from where these
        begin. Both must be very long, or neither, because these are spelled differently."""
        if (len(self._whole) > LONG) != (len(piece) > LONG):
            return 0, [END]
        same = _shared(piece, self._whole)
        return same, self._steps[len(self._whole) - same :]

    def no_nearer(self, most: int) -> list[int]:
        """The number of elements, below `most`, after which as many tokens are left as now."""
        steps = self._steps[self._at + 1 : self._at + most]
        return [length for length, step in enumerate(steps, 1) if step and step[0] >= self.count]


def path(table: TokenTable, piece: Piece, like: CompletionPath | None = None) -> CompletionPath | None:
    """The path from the beginning of `piece`. None if no tokens write it.

    It depends on the piece alone. If the piece ends as `like` does, only its new part costs time.
    """
    known: list[Step | None] = [END]
    same = 0
    if like is not None:
        same, known = like.shared(piece)
    if len(piece) > LONG:
        steps = table.steps_of_longest(piece, known)
    else:
        steps = table.steps(piece[: len(piece) - same], piece, known)
    return None if steps[0] is None else CompletionPath(piece, steps, 0, steps[0])


def _shared(piece: Piece, other: Piece) -> int:
    """How many elements both share at their ends."""
    return bisect_left(
        range(min(len(piece), len(other))), True, key=lambda n: piece[-1 - n :] != other[-1 - n :]
    )


def open_brackets(piece: Piece) -> int:
    """The number of brackets that a completion closes and does not open, whether it begins within a string or
    not."""
    text = bytes(byte if byte < 256 else 0 for byte in piece)
    return max(_depth(text), _depth(b'"' + text))


def _depth(text: bytes) -> int:
    depth = most = 0
    for bracket in _BRACKET.findall(_STRING.sub(b"", text)):
        depth += 1 if bracket in b"]}" else -1
        most = max(most, depth)
    return most
