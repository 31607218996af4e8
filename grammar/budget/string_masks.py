"""Masks within a string, each derived from the one before.

If a string may be any text of at most so many characters, a backend tries most of its vocabulary for every
mask, which takes it longer than anything else in JSON. But the tokens that are allowed there are those that
were allowed before, without those that now have too many characters. Only a token's characters up to the
string's end count, and what may follow the string does not change. If no string has a maximum length, the
mask does not change.
"""

import re
from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from personae.grammar.budget.table import TokenTable

Words = NDArray[np.uint32]

_CHARACTER = re.compile(rb"\\.?|[\x00-\x7f]|[\x80-\xff][\x80-\xbf]*", re.DOTALL)


_FAR = 10**9


class StringState(NamedTuple):
    """A state within a string: the mask, those of its tokens that do not end the string, and the least and
    the most characters that are left, `_FAR` if there is no maximum."""

    words: Words
    within: Words
    least: int
    most: int


class StringMasks:
    """What is known of such states in one vocabulary. Thread-safe."""

    def __init__(self, table: "TokenTable") -> None:
        self._table = table
        self._plain = table.plain(b"")
        self._lengths = np.array([_length(text) for text in table.vocabulary.tokens], np.int32)
        self._within: dict[int, Words] = {}
        # One token of plain text for each length that occurs.
        plain = np.flatnonzero(np.unpackbits(self._plain.view(np.uint8), bitorder="little"))
        found, first = np.unique(self._lengths[plain], return_index=True)
        # The last one without a maximum: most answers are in the same state, and share one row of memory.
        self._endless = self._text(self._plain, _FAR, _FAR)
        self._classes: list[int] = found.tolist()
        self._examples: list[int] = plain[first].tolist()

    def at(self, words: Words, *, endless: bool) -> StringState | None:
        """The state that allows `words`. None if it is not within a value that may be any text and may end,
        or if the value's possible length is not clear. `endless`: no string has a maximum length."""
        table = self._table
        if table.quote is None or table.named is None or not self._classes:
            return None
        if table.holds(words, self._examples[-1]) is not endless:
            return None  # there may be no maximum at all, and the backend is quick
        if not table.holds(words, table.quote) or table.holds(words, table.named) or not table.is_free(words):
            return None
        if endless:
            if not np.array_equal(words, self._endless.words):
                self._endless = self._text(words, _FAR, _FAR)
            return self._endless
        # All texts of the same length are equally allowed.
        count = bisect_right(self._examples, 0, key=lambda token: not table.holds(words, token))
        return self._text(words, self._classes[count - 1], self._classes[count] - 1) if count else None

    def _text(self, words: Words, least: int, most: int) -> StringState:
        return StringState(words.copy(), words & self._plain, least, most)

    def after(self, text: StringState, token: int) -> StringState | None:
        """The state after `token`. None if it is not clear, or the token is not allowed."""
        if not self._table.holds(text.within, token):
            return None
        if text.least == _FAR:
            return text
        length = int(self._lengths[token])
        least, most = text.least - length, text.most - length
        if least < 0 or bisect_right(self._classes, least) != bisect_right(self._classes, most):
            return None
        short = self._of(least)
        return StringState(text.words & short, text.within & short, least, most)

    def _of(self, most: int) -> Words:
        """The tokens with at most so many characters before a string's end."""
        if most not in self._within:
            bits = np.zeros(self._table.words * 32, np.uint8)
            bits[np.flatnonzero(self._lengths <= most)] = 1
            self._within[most] = np.packbits(bits, bitorder="little").view(np.uint32)
        return self._within[most]


def _length(token: bytes) -> int:
    """How many characters of a string a token has, up to the quote that ends it. A begun character counts."""
    if token.isascii() and b'"' not in token and b"\\" not in token:
        return len(token)
    count = 0
    for character in _CHARACTER.findall(token):
        if character == b'"':
            break
        count += 1
    return count
