"""Sets of characters, as sorted ranges of code points. Surrogates are not characters."""

import unicodedata
from collections.abc import Iterable
from functools import cache

Ranges = tuple[tuple[int, int], ...]
"""Sorted and disjoint, with both ends included."""

ALL: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
NONE: Ranges = ()
DIGIT: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
LINE_END: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
SPACE: Ranges = (
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_ESCAPED = frozenset(map(ord, r"\^$.*+?()[]{}|/"))
_BY_NUMBER = frozenset(map(ord, "-&~"))  # these mean something in a class, and must not be escaped outside


def union(parts: Iterable[Ranges]) -> Ranges:
    """The characters of any."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(one for part in parts for one in part):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return intersection(tuple(found), ALL) if found and found[-1][1] >= 0xD800 else tuple(found)


def intersection(one: Ranges, other: Ranges) -> Ranges:
    """The characters of both."""
    found = []
    first = second = 0
    while first < len(one) and second < len(other):
        low, high = max(one[first][0], other[second][0]), min(one[first][1], other[second][1])
        if low <= high:
            found.append((low, high))
        if one[first][1] < other[second][1]:
            first += 1
        else:
            second += 1
    return tuple(found)


def opposite(ranges: Ranges) -> Ranges:
    """All other characters."""
    found, low = [], 0
    for first, last in ranges:
        if first > low:
            found.append((low, first - 1))
        low = last + 1
    if low <= 0x10FFFF:
        found.append((low, 0x10FFFF))
    return intersection(tuple(found), ALL)


def minterms(sets: Iterable[Ranges]) -> list[Ranges]:
    """The largest sets of characters that none of `sets` divides. Together they contain all characters."""
    edges: dict[int, list[tuple[int, bool]]] = {}
    for number, ranges in enumerate(dict.fromkeys((*sets, ALL))):
        for low, high in ranges:
            edges.setdefault(low, []).append((number, True))
            edges.setdefault(high + 1, []).append((number, False))
    found: dict[frozenset[int], list[tuple[int, int]]] = {}
    within: frozenset[int] = frozenset()
    points = sorted(edges)
    for point, following in zip(points, [*points[1:], 0x110000], strict=True):
        for number, begins in edges[point]:
            within = within | {number} if begins else within - {number}
        if within and point < following:
            found.setdefault(within, []).append((point, following - 1))
    return [union([tuple(ranges)]) for ranges in found.values()]


def written(ranges: Ranges) -> str:
    """The ranges as a class or a single character that ECMA-262, Python and Rust read the same way."""
    if ranges == ALL:
        return r"[\s\S]"
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _character(ranges[0][0])
    if ranges[-1][1] == 0x10FFFF:
        return f"[^{''.join(map(_range, opposite(ranges)))}]"
    return f"[{''.join(map(_range, ranges))}]"


def _range(ends: tuple[int, int]) -> str:
    low, high = ends
    if low == high:
        return _character(low)
    return f"{_character(low)}{'' if high == low + 1 else '-'}{_character(high)}"


def _character(point: int) -> str:
    if point < 0x20 or 0x7F <= point < 0xA0 or point in _BY_NUMBER:
        return f"\\x{point:02x}"
    return "\\" + chr(point) if point in _ESCAPED else chr(point)


@cache
def category(name: str) -> Ranges:
    """The characters of a general category, such as L or Lu. Raises KeyError for any other property."""
    found = _categories()
    if name in found:
        return found[name]
    parts = [ranges for one, ranges in found.items() if one.startswith(name)] if len(name) == 1 else []
    if not parts:
        raise KeyError(name)
    return union(parts)


@cache
def _categories() -> dict[str, Ranges]:
    found: dict[str, list[tuple[int, int]]] = {}
    start, current = 0, unicodedata.category("\0")
    for point in range(1, 0x110001):
        here = unicodedata.category(chr(point)) if point < 0x110000 else ""
        if here != current:
            found.setdefault(current, []).append((start, point - 1))
            start, current = point, here
    return {name: intersection(tuple(ranges), ALL) for name, ranges in found.items()}
