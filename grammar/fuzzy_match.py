"""Finds the known name that is closest to a misspelled one."""

from collections.abc import Iterable

_SHORT, _LONG = 4, 8  # characters: from the first length on one typo is allowed, from the second on two


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant. None if none is close. Case does not matter."""
    found = ((_close_matches(name.lower(), one.lower()), one) for one in known)
    near = [
        (close_matches, one)
        for close_matches, one in found
        if close_matches <= (len(one) >= _SHORT) + (len(one) >= _LONG)
    ]
    return min(near)[1] if near else None


def _close_matches(a: str, b: str) -> int:
    """The number of wrong, missing, extra or swapped characters (restricted Damerau-Levenshtein distance). A
    large number if the lengths differ too much."""
    if abs(len(a) - len(b)) > 2:
        return 3
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        new = [i]
        for j, y in enumerate(b, start=1):
            least = min(row[j] + 1, new[-1] + 1, row[j - 1] + (x != y))
            if before and j > 1 and x == b[j - 2] and a[i - 2] == y:
                least = min(least, before[j - 2] + 1)
            new.append(least)
        before, row = row, new
    return row[-1]
