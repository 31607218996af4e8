"""Completions, and what becomes of them as an answer goes on."""

import re
from typing import NamedTuple

from personae.grammar.closing.table import END, LONG, Piece, Step, TokenTable, follow

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*(?:"|$)', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")


class Plan(NamedTuple):
    """A completion, as a piece and as the tokens that write it."""

    piece: Piece
    tokens: tuple[int, ...]


class Speller:
    """Spells the plans of one answer in the fewest tokens.

    What it returns depends on the piece alone; one that ends as the last did costs what is new in it.
    """

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._last: Piece = ()
        self._steps: list[Step | None] = [END]

    def plan(self, piece: Piece) -> Plan | None:
        """`piece` as a plan; None if there are no tokens that write it."""
        if len(piece) > LONG:
            tokens = self._table.spell(piece)
            return None if tokens is None else Plan(piece, tuple(tokens))
        same = _shared(piece, self._last)
        known = self._steps[len(self._last) - same :]
        self._steps = self._table.steps(piece[: len(piece) - same], piece, known)
        self._last = piece
        tokens = follow(self._steps)
        return None if tokens is None else Plan(piece, tuple(tokens))


def _shared(piece: Piece, other: Piece) -> int:
    """How many elements the two end with in common."""
    most = min(len(piece), len(other))
    if piece[len(piece) - most :] == other[len(other) - most :]:
        return most
    return next(n for n in range(most) if piece[-1 - n] != other[-1 - n])


def open_brackets(piece: Piece) -> int:
    """How many brackets a completion closes that it does not open, be it begun within a string or not."""
    text = bytes(byte if byte < 256 else 0 for byte in piece)
    return max(_depth(text), _depth(b'"' + text))


def _depth(text: bytes) -> int:
    depth = most = 0
    for bracket in _BRACKET.findall(_STRING.sub(b"", text)):
        depth += 1 if bracket in b"]}" else -1
        most = max(most, depth)
    return most
