"""What a regular expression asks of an answer that has to end soon.

Read with the standard library's parser, which knows what ECMA-262 and Rust have in common. Where it fails the
answers are cautious guesses.
"""

import re
import re._constants as sre  # type: ignore[import-not-found]  # not part of the typed library
import re._parser as parser  # type: ignore[import-not-found]  # likewise
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

_MOST = 100_000
_PRINTABLE = frozenset(range(0x20, 0x7F)) - {ord('"'), ord("\\")}
_CATEGORIES = {
    sre.CATEGORY_DIGIT: frozenset(range(0x30, 0x3A)),
    sre.CATEGORY_SPACE: frozenset((0x20,)),
    sre.CATEGORY_WORD: frozenset((*range(0x30, 0x3A), *range(0x41, 0x5B), 0x5F, *range(0x61, 0x7B))),
}


@dataclass(frozen=True, slots=True)
class PatternBound:
    """`longest`: however a matching text has begun, so many characters more can end it.

    `example` is a short text that matches, "" where none is known. `wide`: its classes together hold every
    printable character, so that plain text may matter to it. `ascii`: it names all of its characters, and
    they are of one byte. `fixed`: it is about the whole text, so that nowhere is any plain text allowed.
    """

    longest: int
    example: str
    wide: bool
    ascii: bool = False
    fixed: bool = False

    @property
    def bytes(self) -> int:
        """`longest` in bytes, a character that is half written included."""
        return self.longest if self.ascii else 4 * self.longest


@lru_cache(maxsize=1024)  # a schema has the same ones over and over, formats above all
def pattern_distances(pattern: str) -> PatternBound:
    """What `pattern` asks, anchored or not."""
    try:
        tree = parser.parse(pattern)
    except (re.error, OverflowError, RecursionError, ValueError):
        return PatternBound(8 * len(pattern) + 64, "", True)
    covered: set[int] = set()
    for members in _classes(tree):
        covered |= members
    wide = covered >= _PRINTABLE
    whole = len(tree) > 1 and tree[0] == (sre.AT, sre.AT_BEGINNING) and tree[-1] == (sre.AT, sre.AT_END)
    return PatternBound(min(_longest(tree), _MOST), _example(tree), wide, _is_ascii(tree), whole and not wide)


def _is_ascii(tree: Any) -> bool:
    for op, value in tree:
        if op is sre.LITERAL:
            plain = value < 128
        elif op is sre.IN:
            plain = all(
                (kind is sre.LITERAL and one < 128)
                or (kind is sre.RANGE and one[1] < 128)
                or (kind is sre.CATEGORY and one is sre.CATEGORY_DIGIT)
                for kind, one in value
            )
        elif op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            plain = _is_ascii(value[2])
        elif op is sre.SUBPATTERN:
            plain = _is_ascii(value[3])
        elif op is sre.BRANCH:
            plain = all(map(_is_ascii, value[1]))
        else:
            plain = op is sre.AT
        if not plain:
            return False
    return True


def _longest(tree: Any) -> int:
    """The sum over everything that may still have to be written."""
    total = 0
    for op, value in tree:
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            least, _, inner = value
            total += least * inner.getwidth()[0] + _longest(inner)
        elif op is sre.SUBPATTERN:
            total += _longest(value[3])
        elif op is sre.BRANCH:
            total += max(_longest(one) for one in value[1])
        elif op is sre.ATOMIC_GROUP:
            total += _longest(value)
        elif op is not sre.AT:
            total += 1
        if total > _MOST:
            return _MOST
    return total


def _example(tree: Any) -> str:
    """One of the shortest texts that match, by the shortest branch and the first member of each class."""
    text = ""
    for op, value in tree:
        if op is sre.LITERAL:
            text += chr(value)
        elif op is sre.NOT_LITERAL:
            text += "a" if value != ord("a") else "b"
        elif op is sre.ANY:
            text += "a"
        elif op is sre.IN:
            members = sorted(_members(value) & _PRINTABLE)
            text += chr(next((one for one in members if chr(one).isalnum()), members[0] if members else 0x61))
        elif op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            text += _example(value[2]) * min(value[0], _MOST)
        elif op is sre.SUBPATTERN:
            text += _example(value[3])
        elif op is sre.BRANCH:
            text += _example(min(value[1], key=lambda one: one.getwidth()[0]))
        elif op is sre.ATOMIC_GROUP:
            text += _example(value)
        if len(text) > _MOST:
            return ""
    return text


def _classes(tree: Any) -> Iterator[frozenset[int]]:
    for op, value in tree:
        if op is sre.LITERAL:
            yield frozenset((value,))
        elif op is sre.NOT_LITERAL:
            yield frozenset(range(128)) - {value}
        elif op is sre.ANY:
            yield frozenset(range(128))
        elif op is sre.IN:
            yield _members(value)
        elif op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            yield from _classes(value[2])
        elif op is sre.SUBPATTERN:
            yield from _classes(value[3])
        elif op is sre.BRANCH:
            for one in value[1]:
                yield from _classes(one)
        elif op is sre.ATOMIC_GROUP:
            yield from _classes(value)


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
            found |= _CATEGORIES.get(value, frozenset(range(128)))
    return frozenset(range(128)) - found if negated else frozenset(found)
