"""Regular expressions for other keywords of JSON Schema about strings.

They consist of literals, classes and groups alone, which ECMA-262, Python and Rust read the same way.
"""

import re
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from personae.grammar.regex.automaton import automaton
from personae.grammar.regex.parse import NotRegular, parse
from personae.grammar.regex.plain import NOTHING, conjuncts, literal, plain
from personae.grammar.schema.formats import PATTERNS, WIDE
from personae.grammar.schema.walk import rebuild

ANY = r"[\s\S]"
_ALWAYS_FOUND = ("", "^", "$")
_OF_STRINGS = frozenset(
    {
        "type",
        "pattern",
        "allOf",
        "not",
        "enum",
        "const",
        "format",
        "minLength",
        "maxLength",
        "title",
        "description",
    }
)


def any_of_length(minimum: int, maximum: int | None) -> str:
    """The strings of `minimum` to `maximum` characters."""
    return f"^{ANY}{{{minimum},{'' if maximum is None else maximum}}}$"


def anything_but(words: Iterable[str]) -> str:
    """The strings that are none of `words`."""
    return f"^(?:{_differs(sorted(set(words)))})$"


def _differs(words: list[str]) -> str:
    """What may follow, where none of `words` (sorted, without repetition) may follow."""
    alternatives = [] if "" in words else [""]
    firsts = []
    for first, group in groupby((word for word in words if word), key=lambda word: word[0]):
        firsts.append(re.escape(first) if first != "^" else r"\^")
        rest = _differs([word[1:] for word in group])
        alternatives.append(f"{re.escape(first)}(?:{rest})")
    other = f"[^{''.join(firsts)}]" if firsts else ANY
    alternatives.append(f"{other}{ANY}*")
    return "|".join(alternatives)


def language(schema: Any, *, wide: bool = False) -> str | None:
    """One pattern without look-around for the strings that a schema accepts; None if it is not known.

    For a format, it matches fewer strings than the format accepts, or more with `wide`.
    """
    matched, unmatched = [ANY + "*"], []
    unseen = [schema]
    while unseen:
        one = unseen.pop()
        if one is True:
            continue
        if (
            not isinstance(one, dict)
            or not one.keys() <= _OF_STRINGS
            or one.get("type", "string") != "string"
        ):
            return None
        unseen += one.get("allOf", ())
        if "pattern" in one:
            matched.append(one["pattern"])
        if "format" in one:
            known = WIDE.get(one["format"]) if wide else f"^(?:{PATTERNS.get(one['format'], NOTHING)})$"
            if known is None:
                return None
            matched.append(known)
        if "minLength" in one or "maxLength" in one:
            matched.append(any_of_length(one.get("minLength", 0), one.get("maxLength")))
        if "enum" in one or "const" in one:
            matched.append(any_of([one["const"]] if "const" in one else one["enum"]))
        if "not" in one:
            barred = language(one["not"], wide=not wide)
            if barred is None:
                return None
            unmatched.append(barred)
    try:
        return plain(tuple(matched[1:] or matched), tuple(unmatched)) or NOTHING
    except NotRegular:
        return None


def exclusive(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """Whether no string satisfies all parts of both. False also if that is not evident."""
    said = [part for part in (*one, *other) if {"pattern", "format"} & part.keys()]
    patterns = [part["pattern"] for part in said if "pattern" in part]
    patterns += [WIDE[part["format"]] for part in said if part.get("format") in WIDE]
    try:
        return len(said) > 1 and plain(tuple(patterns)) is None
    except NotRegular:
        return False


def endless(pattern: str) -> bool:
    """Whether every beginning of a match can continue in any number of ways. False also if that is not
    known."""
    try:
        found = automaton((parse(pattern),))
    except NotRegular:
        return False
    ways = [set(row) for row in found.steps]
    live = {state for state, accepts in enumerate(found.accepting) if accepts}
    while more := {state for state, after in enumerate(ways) if after & live} - live:
        live |= more
    left = set(live)  # of these, the states from which infinitely many texts are accepted
    while ended := {state for state in left if not ways[state] & left}:
        left -= ended
    return bool(left) and left == live


def any_of(words: Iterable[Any]) -> str:
    """The strings among `words`."""
    return f"^(?:{'|'.join(literal(word) for word in words if isinstance(word, str)) or NOTHING})$"


def plain_patterns(schema: Any) -> Any:
    """An equal schema whose patterns the library reads as ECMA-262 does, as far as such patterns exist."""
    if not isinstance(schema, dict):
        return schema
    rebuilt = rebuild(schema, lambda _, child: plain_patterns(child))
    if isinstance(rebuilt.get("pattern"), str):
        first, *others = conjuncts(rebuilt["pattern"])
        rebuilt["pattern"] = first
        if first in _ALWAYS_FOUND:
            del rebuilt["pattern"]
        if others:
            rebuilt["allOf"] = [*rebuilt.get("allOf", ()), *({"pattern": one} for one in others)]
    if isinstance(rebuilt.get("patternProperties"), dict):
        named: dict[str, Any] = {}
        for pattern, one in rebuilt["patternProperties"].items():
            parts = conjuncts(pattern)
            name = parts[0] if len(parts) == 1 else (language({"pattern": pattern}) or pattern)
            named[name] = {"allOf": [named[name], one]} if name in named else one
        rebuilt["patternProperties"] = named
    return rebuilt
