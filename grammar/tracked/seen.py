"""Knows which items a set has so far, and which tokens would write one of them again.

What is known is kept per item, in persistent collections: a mask then costs as much in a set of thousands of
items as in one of a few, and the states of an answer share what they have in common.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rpds import HashTrieMap, HashTrieSet

Beginning = Callable[[bytes, bool], NDArray[np.int64]]
"""Returns the tokens that write a text at their beginning; True if they begin an item."""

NO_TEXTS: "HashTrieSet[bytes]" = HashTrieSet()
_NONE_BARRED: "HashTrieMap[bytes, NDArray[np.int64]]" = HashTrieMap()


class SeenItems(NamedTuple):
    """The items of a set, or the names of an object. Immutable."""

    texts: "HashTrieSet[bytes]" = NO_TEXTS
    barred: "HashTrieMap[bytes, NDArray[np.int64]]" = _NONE_BARRED  # by what has been written of an item

    def having(self, text: bytes) -> "SeenItems":
        """These and one more."""
        return self._replace(texts=self.texts.insert(text))

    def barring(
        self, texts: Sequence[bytes], longest: int, beginning: Beginning, *, ends: int = 0
    ) -> "SeenItems":
        """The same, if no token may complete one of `texts`, however much of it is written before. No token
        has more than `longest` bytes. The tokens that write only the last `ends` bytes, or less, are not kept
        here."""
        barred = self.barred
        for text in texts:
            for size in range(max(len(text) - longest, 0), len(text) - ends):
                tokens = beginning(text[size:], size == 0)
                if len(tokens):
                    begun = text[:size]
                    before = barred.get(begun)
                    barred = barred.insert(begun, tokens if before is None else np.union1d(before, tokens))
        return self._replace(barred=barred)
