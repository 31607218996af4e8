"""What a regular expression requires of an answer that has to end soon.

The standard library's parser reads it, which covers what ECMA-262 and Rust have in common. Where it fails,
the results are cautious guesses.
"""

import re
import re._constants as sre  # type: ignore[import-not-found]  # not part of the typed library
import re._parser as parser  # type: ignore[import-not-found]  # likewise
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

_MOST = 100_000
_ASCII = frozenset(range(128))
_PRINTABLE = frozenset(range(0x20, 0x7F)) - {ord('"'), ord("\\")}
_CATEGORIES = {
    sre.CATEGORY_DIGIT: frozenset(range(0x30, 0x3A)),
    sre.CATEGORY_SPACE: frozenset((0x20,)),
    sre.CATEGORY_WORD: frozenset((*range(0x30, 0x3A), *range(0x41, 0x5B), 0x5F, *range(0x61, 0x7B))),
}


@dataclass(frozen=True, slots=True)
class PatternBound:
    """`longest`: however a matching text has begun, at most this many characters more can end it.

    `example` is a short text that matches, "" if none is known. `wide`: its classes together contain every
    printable character, so plain text may matter to it. `ascii`: it names all of its characters, and each has
    one byte. `fixed`: it is about the whole text, so plain text is not allowed anywhere.
    """

    longest: int
    example: str
    wide: bool
    ascii: bool = False
    fixed: bool = False

    @property
    def bytes(self) -> int:
        """`longest` in bytes, including a half-written character."""
        return self.longest if self.ascii else 4 * self.longest


@lru_cache(maxsize=1024)  # a schema repeats the same ones, above all formats
def pattern_distances(pattern: str) -> PatternBound:
    """The bound of `pattern`, anchored or not."""
    try:
        tree = parser.parse(pattern)
    except (re.error, OverflowError, RecursionError, ValueError):
        return PatternBound(8 * len(pattern) + 64, "", True)
    part = _whole(tree)
    wide = part.covered >= _PRINTABLE
    whole = len(tree) > 1 and tree[0] == (sre.AT, sre.AT_BEGINNING) and tree[-1] == (sre.AT, sre.AT_END)
    return PatternBound(part.longest, part.example, wide, part.ascii, whole and not wide)


class _Part(NamedTuple):
    """For a part of a pattern: as in `PatternBound`, and the ASCII characters in its classes."""

    longest: int = 1
    example: str = ""
    covered: frozenset[int] = frozenset()
    ascii: bool = False


def _whole(tree: Any) -> _Part:
    """Parts in a row; all of them may still have to be written."""
    parts = [_part(op, value) for op, value in tree]
    example = "".join(part.example for part in parts)
    return _Part(
        min(sum(part.longest for part in parts), _MOST),
        example if len(example) <= _MOST else "",
        frozenset().union(*(part.covered for part in parts)),
        all(part.ascii for part in parts),
    )


def _part(op: Any, value: Any) -> _Part:
    """The bound of one part. The example is one of the shortest: by the shortest branch and the first member
    of each class."""
    match op:
        case sre.LITERAL:
            return _Part(1, chr(value), frozenset((value,)), value < 128)
        case sre.NOT_LITERAL:
            return _Part(1, "a" if value != ord("a") else "b", _ASCII - {value})
        case sre.ANY:
            return _Part(1, "a", _ASCII)
        case sre.IN:
            members = _members(value)
            shown = [chr(one) for one in sorted(members & _PRINTABLE)]
            return _Part(1, next(filter(str.isalnum, shown), (shown or "a")[0]), members, _is_ascii(value))
        case sre.MAX_REPEAT | sre.MIN_REPEAT | sre.POSSESSIVE_REPEAT:
            least, _, inner = value
            part = _whole(inner)
            example = part.example * least if len(part.example) * least <= _MOST else ""
            return part._replace(longest=least * inner.getwidth()[0] + part.longest, example=example)
        case sre.SUBPATTERN:
            return _whole(value[3])
        case sre.BRANCH:
            parts = [_whole(branch) for branch in value[1]]
            widths = [branch.getwidth()[0] for branch in value[1]]
            return _Part(
                max(part.longest for part in parts),
                parts[widths.index(min(widths))].example,
                frozenset().union(*(part.covered for part in parts)),
                all(part.ascii for part in parts),
            )
        case sre.ATOMIC_GROUP:
            return _whole(value)._replace(ascii=False)
        case sre.AT:
            return _Part(0, ascii=True)
    return _Part()


def _is_ascii(items: Any) -> bool:
    """Whether a class names its characters, and each has one byte."""
    return all(
        (kind is sre.LITERAL and one < 128)
        or (kind is sre.RANGE and one[1] < 128)
        or (kind is sre.CATEGORY and one is sre.CATEGORY_DIGIT)
        for kind, one in items
    )


def _members(items: Any) -> frozenset[int]:
    """The ASCII characters in a class."""
    found: set[int] = set()
    negated = False
    for op, value in items:
        if op is sre.NEGATE:
            negated = True
        elif op is sre.LITERAL:
            found.add(value)
        elif op is sre.RANGE:
            found.update(range(value[0], min(value[1], 127) + 1))
        elif op is sre.CATEGORY:
            found |= _CATEGORIES.get(value, _ASCII)
    return _ASCII - found if negated else frozenset(found)
