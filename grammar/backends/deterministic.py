"""Finds regular expressions whose automata are no larger than themselves, and that every library reads the
same way.

An expression is one-unambiguous (Brüggemann-Klein and Wood 1998, https://doi.org/10.1006/inco.1997.2695) if
each character of a text, as it is read, can stand for only one place of the expression. The places are then
the states of an automaton; in general there are as many states as sets of places. The standard library's
parser reads the expression. Constructs that Rust's syntax or Unicode's classes might read differently are not
accepted.
"""

import re
import re._constants as sre  # type: ignore[import-not-found]  # not part of the typed library
import re._parser as parser  # type: ignore[import-not-found]  # likewise
from typing import Any

Characters = frozenset[int]

_DEPTH = 8  # of groups, each of which is read twice
_END = frozenset((-1,))
_DIGITS = frozenset(range(0x30, 0x3A))
_ESCAPE = r"\\[dnrt !-/:;=?@\[-`{-~]"
_SHARED = re.compile(
    rf"(?:[^\\\[\](){{}}.^$*+?|\x00-\x1f\x7f]|{_ESCAPE}|\[(?!\^)(?:(?!--)(?:[^\\\[\]&~\x00-\x1f\x7f]|{_ESCAPE}))+\]"
    r"|\((?:\?:|(?!\?))|[)|*+?]|\{\d{1,6}(?:,\d{0,6})?\})*"
)
_AROUND = re.compile(r"\^?(.*?(?<!\\)(?:\\\\)*)\$?", re.DOTALL)


class _Ambiguous(Exception):
    """A character may stand for two places, or the expression contains something that is not supported
    here."""


def unanchored(pattern: str) -> str:
    """The pattern without anchors around it: an answer matches as a whole either way."""
    found = _AROUND.fullmatch(pattern)
    return found[1] if found else pattern


def places(pattern: str) -> int | None:
    """An upper bound of the bytes that an automaton for an unanchored expression distinguishes. None if that
    is not clear."""
    if not _SHARED.fullmatch(pattern):
        return None
    try:
        return _read(parser.parse(pattern), frozenset(), _DEPTH)[0]
    except (_Ambiguous, re.error, OverflowError, RecursionError):
        return None


def _read(tree: Any, after: Characters, depth: int) -> tuple[int, Characters]:
    """The places of `tree`, and the characters with which it may begin. If it may be empty, this includes
    those of `after`, which follows it."""
    if not depth:
        raise _Ambiguous
    count = 0
    for op, value in reversed(tree):
        if op is sre.LITERAL:
            more, after = len(chr(value).encode()), frozenset((value,))
        elif op is sre.IN:
            after = _members(value)
            more = sum({len(chr(one).encode()) for one in after})
        elif op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            more, after = _repeated(value, after, depth)
        elif op is sre.SUBPATTERN:
            more, after = _read(value[3], after, depth - 1)
        elif op is sre.BRANCH:
            more, after = _branches(value[1], after, depth)
        else:
            raise _Ambiguous
        count += more
    return count, after


def _repeated(value: Any, after: Characters, depth: int) -> tuple[int, Characters]:
    least, most, part = value
    _, first = _read(part, _END, depth - 1)
    if first & _END or (least != most and first & after):
        raise _Ambiguous
    again = most is sre.MAXREPEAT or most > 1
    more, _ = _read(part, after | first if again else after, depth - 1)
    return more * (max(least, 1) if most is sre.MAXREPEAT else most), first if least else first | after


def _branches(parts: Any, after: Characters, depth: int) -> tuple[int, Characters]:
    # Words at the end form a tree of their letters.
    words = not after and all(op is sre.LITERAL for part in parts for op, _ in part)
    count, first = 0, frozenset[int]()
    for part in parts:
        more, begins = _read(part, after, depth - 1)
        if first & begins and not words:
            raise _Ambiguous
        count, first = count + more, first | begins
    return count, first


def _members(items: Any) -> Characters:
    found: set[int] = set()
    for op, value in items:
        if op is sre.LITERAL:
            found.add(value)
        elif op is sre.RANGE and value[1] < 128:
            found.update(range(value[0], value[1] + 1))
        elif op is sre.CATEGORY and value is sre.CATEGORY_DIGIT:
            found |= _DIGITS
        else:
            raise _Ambiguous
    return frozenset(found)
