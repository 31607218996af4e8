"""Estimates how far a compiled grammar may grow while answers are bound by it.

The lexer of a grammar is built while answers are read, and is kept. It stays small, except if a regular
expression continues after an open repetition, or after alternatives, that may end at any place. There are
then as many states as there are sets of places at which it may have ended.
"""

import re

import msgspec

from personae.grammar.sandbox.small import bound_parts, members, width
from personae.grammar.spec import GrammarSpec

_STATE = 2_000  # bytes
_MOST = 64_000_000  # bytes: six answers of 300 tokens were seen to leave 53 MB
_VARIABLE = re.compile(r"(?<![\\(])[*+?]|\{\d*,\d*\}")
_GROUP_REPEATED = re.compile(r"\)(?:[*+]|\{)")


def size_estimate(spec: GrammarSpec) -> int:
    """Bytes to expect in addition to those of the grammar when it has just been compiled."""
    match spec.kind:
        case "regex":
            return min(_of_pattern(spec.source), _MOST)
        case "json_schema":
            return min(_of_schemas([msgspec.json.decode(spec.source)]), _MOST)
        case "structure":
            schemas, patterns, grammars = bound_parts(spec.source)
            if grammars:
                return _MOST
            return min(_of_schemas(schemas) + sum(map(_of_pattern, patterns)), _MOST)
        case "lark":
            return _MOST
    return 0


def _of_schemas(schemas: list[object]) -> int:
    total = 0
    for _, name, value in members(schemas):
        if name == "pattern" and isinstance(value, str):
            total += _of_pattern(value)
        elif name == "patternProperties" and isinstance(value, dict):
            total += sum(map(_of_pattern, value))
    return total


def _of_pattern(pattern: str) -> int:
    variable = _VARIABLE.search(pattern)
    if _GROUP_REPEATED.search(pattern) and (variable is not None or "|" in pattern):
        return _MOST
    if variable is None:
        return 0
    places = width(pattern[variable.end() :])
    return _MOST if places > 16 else _STATE << places
