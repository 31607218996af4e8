"""Which specs are compiled without a trial: those whose cost is bounded by what is seen of them.

A compile is costly where a few characters stand for much: a repetition with a large number, a regular
expression whose states multiply, references and alternatives that unfold into each other. What has few of
these, and is short, takes milliseconds.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.elements import Json, Lark, Regex, decode_structure, replace_bound

_LENGTH = 8192  # characters of a spec
_DEPTH = 32
_BRANCHES = 12  # references and combinations in all
_NUMBER = 256  # of any bound on a size, or what is to be a multiple of
_MULTIPLES = 2  # of numbers, each of which takes as many states as it is large
_PATTERN = 96  # characters of a regular expression
_REPEATED = 128  # characters that its counted repetitions stand for
_SIZES = frozenset(
    {
        *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        *("minContains", "maxContains"),
    }
)
_BRANCHING = frozenset(
    {
        *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "contains", "patternProperties"),
        *("propertyNames", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems"),
    }
)
_COUNTED = re.compile(r"\{(\d*)(,?)(\d*)\}")
_UNBOUNDED = re.compile(r"(?<!\\)[*+]|\{\d*,\}")
_GROUP_REPEATED = re.compile(r"\)(?:[*+]|\{)")


def is_small(spec: GrammarSpec) -> bool:
    """Whether it may be compiled beside the steps."""
    if len(spec.source) > _LENGTH:
        return False
    match spec.kind:
        case "json_object" | "choice":
            return True
        case "regex":
            return is_plain(spec.source)
        case "json_schema":
            try:
                return _small_schemas([msgspec.json.decode(spec.source)])
            except (msgspec.DecodeError, RecursionError):
                return True  # refused at once
        case "structure":
            return _small_structure(spec.source)
    return False


def _small_structure(source: str) -> bool:
    schemas: list[Any] = []
    patterns: list[str] = []
    grammars: list[str] = []

    def note(element: Json | Regex | Lark) -> Json | Regex | Lark:
        match element:
            case Json(schema=schema):
                schemas.append(schema)
            case Regex(pattern=pattern):
                patterns.append(pattern)
            case Lark(source=grammar):
                grammars.append(grammar)
        return element

    replace_bound(decode_structure(source), note)
    return not grammars and all(map(is_plain, patterns)) and _small_schemas(schemas)


def _small_schemas(schemas: list[Any]) -> bool:
    branches = multiples = 0
    for depth, name, value in _members(schemas):
        if depth > _DEPTH:
            return False
        if name in _SIZES and isinstance(value, int | float) and value > _NUMBER:
            return False
        if name == "multipleOf":
            multiples += 1
            if multiples > _MULTIPLES or not isinstance(value, int | float) or value > _NUMBER:
                return False
        if name == "pattern" and isinstance(value, str) and not is_plain(value):
            return False
        if name == "patternProperties" and isinstance(value, dict) and not all(map(is_plain, value)):
            return False
        branches += name in _BRANCHING
    return branches <= _BRANCHES


def _members(values: list[Any]) -> Iterator[tuple[int, str, Any]]:
    """(depth, name, value) of all members of all objects, whatever they mean where they stand."""
    left = [(0, value) for value in values]
    while left:
        depth, value = left.pop()
        if isinstance(value, dict):
            yield from ((depth, name, member) for name, member in value.items())
            left += ((depth + 1, member) for member in value.values())
        elif isinstance(value, list):
            left += ((depth + 1, item) for item in value)


def is_plain(pattern: str) -> bool:
    """A regular expression with one open repetition at most, and none of a group."""
    if len(pattern) > _PATTERN or _GROUP_REPEATED.search(pattern):
        return False
    counted = sum(int(most or least or 0) for least, _, most in _COUNTED.findall(pattern))
    return counted <= _REPEATED and len(_UNBOUNDED.findall(pattern)) <= 1
