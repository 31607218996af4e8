"""Finds grammars in GBNF that match no text, without the library: `root ::= root`.

A rule that needs itself in every alternative never ends. A grammar that is not understood here is left to the
library, which reports what is wrong with it.
"""

import re
from collections.abc import Iterator

_TOKEN = re.compile(
    r"""(?P<skip>\s+|\#[^\n]*)
    |(?P<rule>[A-Za-z_][\w.-]*)\s*::=
    |(?P<name>[A-Za-z_][\w.-]*)
    |(?P<text>"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|\.)
    |(?P<repeat>[*+?]|\{\s*(?P<least>\d+)\s*(?:,\s*\d*\s*)?\})
    |(?P<mark>[()|])""",
    re.VERBOSE,
)
_Token = tuple[str, str]
_LENGTH = 16_384  # characters; the library checks longer grammars, and chains of more rules
_ROUNDS = 64


class _NotUnderstood(Exception):
    """A construct that is not understood here."""


def matches_nothing(source: str) -> bool:
    """Whether it is certain that no text matches."""
    if len(source) > _LENGTH:
        return False
    try:
        rules = dict(_rules(source))
    except _NotUnderstood:
        return False
    ending: set[str] = set()
    for _ in range(_ROUNDS):
        more = {name for name, body in rules.items() if name not in ending and _ends(body, ending, rules)}
        if not more:
            return "root" in rules and "root" not in ending
        ending |= more
    return False


def _tokens(source: str) -> Iterator[_Token]:
    at = 0
    while at < len(source):
        match = _TOKEN.match(source, at)
        if match is None:
            raise _NotUnderstood
        at = match.end()
        kind = match.lastgroup or ""
        kind = "repeat" if kind == "least" else kind
        if kind == "repeat":
            yield kind, "0" if match[0] in "*?" or match["least"] == "0" else "1"
        elif kind != "skip":
            yield kind, match["rule"] or match[0]


def _rules(source: str) -> Iterator[tuple[str, list[_Token]]]:
    name, body = "", list[_Token]()
    for kind, text in _tokens(source):
        if kind == "rule":
            if name:
                yield name, body
            name, body = text, []
        elif not name:
            raise _NotUnderstood
        else:
            body.append((kind, text))
    if name:
        yield name, body


def _ends(body: list[_Token], ending: set[str], rules: dict[str, list[_Token]]) -> bool:
    """Whether some text matches the body of a rule, if only the rules in `ending` match any text."""
    outer: list[tuple[bool, bool, bool]] = []
    some, all_so_far, last = False, True, True  # of earlier alternatives; of earlier items; of the last item
    for kind, text in body:
        match kind, text:
            case "repeat", "0":
                last = True
            case "repeat", _:
                pass
            case "mark", "(":
                outer.append((some, all_so_far and last, True))
                some, all_so_far, last = False, True, True
            case "mark", ")":
                inner = some or (all_so_far and last)
                if not outer:
                    return True
                some, all_so_far, _ = outer.pop()
                last = inner
            case "mark", _:
                some, all_so_far, last = some or (all_so_far and last), True, True
            case "name", name:
                all_so_far, last = all_so_far and last, name in ending or name not in rules
            case _:
                all_so_far, last = all_so_far and last, True
    return bool(outer) or some or (all_so_far and last)
