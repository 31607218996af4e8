"""Knows which names are left in an object with many properties. Other names are allowed only if they begin
with a given text.

A matcher sees to it that none is written twice. What has been written of a name must also be able to become
one that is left: `"colour` must not be begun if only `"color` is left.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator

from rpds import HashTrieSet

_END = b'"'
_BEGINNING = re.compile(r"\^((?:[A-Za-z0-9_:@ -]|\\[.$*+?(){}|/-])+)(?:\.\*)?")


class ListedNames:
    """The names of an object, as they are written, and how others begin. Immutable."""

    def __init__(self, names: frozenset[bytes], beginnings: frozenset[bytes] = frozenset()) -> None:
        self._names = names
        self._beginnings = beginnings

    def left(self, seen: "HashTrieSet[bytes]") -> int:
        """How many names can be written after those `seen`, at least."""
        return 1 + len(self._names) if self._beginnings else len(self._names) - len(seen)

    def allows(self, begun: bytes, seen: "HashTrieSet[bytes]") -> bool:
        """Whether a begun name can become one that was not `seen`."""
        if any(one.startswith(begun) or begun.startswith(one) for one in self._beginnings):
            return True
        return any(name.startswith(begun) and name not in seen for name in self._names)

    def barred(self, begun: bytes, seen: "HashTrieSet[bytes]") -> Iterator[bytes]:
        """The shortest texts after `begun`, a begun name, with which it can only become one of `seen`."""
        left = sorted(name + _END for name in self._names if name.startswith(begun) and name not in seen)
        found = set()
        for name in seen:
            if name.startswith(begun):
                whole = name + _END
                place = bisect_left(left, whole)
                nearest = [*left[max(place - 1, 0) : place + 1], *self._beginnings]
                if whole.startswith(tuple(self._beginnings)):
                    nearest = [name]  # it can always go on
                shared = max((_shared(whole, other) for other in nearest), default=0)
                found.add(whole[len(begun) : max(shared, len(begun)) + 1])
        yield from found


def _shared(one: bytes, other: bytes) -> int:
    """The length of what both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (here, there) in pairs if here != there), min(len(one), len(other)))


def beginning(pattern: str) -> str | None:
    """The text with which all names begin that match a pattern, if all that begin so match it."""
    found = _BEGINNING.fullmatch(pattern)
    return None if found is None else re.sub(r"\\(.)", r"\1", found[1])
