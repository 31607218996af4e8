"""Answers as text in which each special token is one character."""

import re
from collections.abc import Iterable, Mapping

from personae.grammar.budget.table import Piece
from personae.grammar.structure.marks import Marks

Raw = str
"""A piece (budget/table.py) with one character for each of its elements."""

_SPECIAL = re.compile(r"([^\x00-\xff])")
_MARK = re.compile("([\ud800-\udfff])")
_UNKNOWN = "\ufffd"


def raw(piece: Iterable[int]) -> Raw:
    """The piece with one character for each element."""
    return "".join(map(chr, piece))


def piece_of(answer: Raw) -> Piece:
    """The piece whose elements the characters are."""
    return tuple(map(ord, answer))


class AnswerTexts:
    """Converts answers. `special` maps the names of special tokens to their elements of pieces; `texts` are
    all the texts in which they have a meaning."""

    def __init__(self, special: Mapping[str, int], texts: str) -> None:
        self._marks = Marks(special, texts)
        self._elements = {
            mark: chr(element) for element in special.values() if (mark := self._marks.of(element))
        }

    def put(self, text: str) -> str:
        """The text with a character for each name of a special token."""
        return self._marks.put(text)

    def decode(self, answer: Raw) -> str:
        """The text of an answer. A character that is written in part becomes one character."""
        try:
            return answer.encode("latin-1").decode(errors="replace")  # without special tokens, as most are
        except UnicodeEncodeError:
            parts = _SPECIAL.split(answer)
        parts[::2] = [part.encode("latin-1").decode(errors="replace") for part in parts[::2]]
        parts[1::2] = [self._marks.of(ord(part)) or _UNKNOWN for part in parts[1::2]]
        return "".join(parts)

    def encode(self, text: str) -> Raw:
        """The answer with this text."""
        parts = _MARK.split(text)
        parts[::2] = [part.encode().decode("latin-1") for part in parts[::2]]
        parts[1::2] = [self._elements.get(part, "") for part in parts[1::2]]
        return "".join(parts)
