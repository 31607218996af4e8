"""Decides which specs are compiled without the sandbox: those whose cost is evidently bounded.

A compile is expensive if few characters stand for much: a repetition with a large number, a regular
expression whose states multiply, references and alternatives that unfold into each other, or an answer that
is long before it can end, because the shortest one is searched for. A spec that is short and has few of these
takes milliseconds.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from personae.grammar.regex.plain import looks_around
from personae.grammar.schema.prepare import ANALYSIS_ERRORS
from personae.grammar.schema.shortest import shortest_alone, shortest_instance
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.elements import Json, Lark, Regex, decode_structure, replace_bound

_LENGTH = 8192  # characters of a spec
_DEPTH = 32
_BRANCHES = 12  # references and combinations in all
_NUMBER = 256  # of any bound on a size, or of `multipleOf`
_MULTIPLES = 2  # of numbers, each of which takes as many states as its value
_PATTERN = 96  # characters of a regular expression
_REPEATED = 128  # characters that counted repetitions stand for
_SHORTEST = 512  # characters of an answer
_FORMATTED = 36  # characters that a format may require
_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
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
_UNCOUNTED = frozenset({"minProperties", "minContains"})  # they only say how short an answer can be
_COUNTING = frozenset({"contains", "minContains", "dependentRequired", "dependencies"})
_COUNTED = re.compile(r"\{(\d*)(,?)(\d*)\}")
_UNBOUNDED = re.compile(r"(?<!\\)[*+]|\{\d*,\}")
_CLASS = re.compile(r"\[[^\]]*\]|\\.")
_GROUP_REPEATED = re.compile(r"\)(?:[*+]|\{)")


def is_small(spec: GrammarSpec) -> bool:
    """Whether the spec may be compiled in the engine's process."""
    if len(spec.source) > _LENGTH:
        return False
    match spec.kind:
        case "json_object" | "choice":
            return True
        case "regex":
            return is_plain(spec.source) and not looks_around(spec.source)
        case "json_schema":
            try:
                return _small_schemas([msgspec.json.decode(spec.source)])
            except (msgspec.DecodeError, RecursionError):
                return True  # refused at once
        case "structure":
            return _small_structure(spec.source)
    return False


def is_foreign(spec: GrammarSpec) -> bool:
    """Whether the spec contains a grammar that a client wrote. The cost of its masks is not known in
    advance."""
    if spec.kind == "structure":
        return bool(bound_parts(spec.source)[2])
    return spec.kind in ("ebnf", "lark")


def _small_structure(source: str) -> bool:
    schemas, patterns, grammars = bound_parts(source)
    if grammars or not all(map(is_plain, patterns)):
        return False
    return _small_schemas(schemas, sum(map(width, patterns)))


def bound_parts(source: str) -> tuple[list[Any], list[str], list[str]]:
    """The schemas, regular expressions and grammars of a structure."""
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
    return schemas, patterns, grammars


def _small_schemas(schemas: list[Any], free: int = 0) -> bool:
    """`free` are the characters of an answer that no schema binds."""
    branches = multiples = 0
    for depth, name, value in members(schemas):
        if depth > _DEPTH:
            return False
        if name in _SIZES and isinstance(value, int | float) and value > _NUMBER:
            return False
        if name in _UNCOUNTED and isinstance(value, int | float) and value > 1:
            return False
        if name in _COUNTING and value:
            return False  # the search for the shortest answer might fail
        if name == "multipleOf":
            multiples += 1
            if multiples > _MULTIPLES or not isinstance(value, int | float) or value > _NUMBER:
                return False
        if name == "pattern" and isinstance(value, str) and not is_plain(value):
            return False
        if name == "patternProperties" and isinstance(value, dict) and not all(map(is_plain, value)):
            return False
        branches += name in _BRANCHING
    if branches > _BRANCHES:
        return False
    try:
        return free + sum(map(_shortest, schemas)) <= _SHORTEST
    except ANALYSIS_ERRORS:  # it is malformed, or uses rare keywords
        return False


def _shortest(schema: Any) -> float:
    weighted = _weighted(schema)
    alone = shortest_alone(weighted)
    return shortest_instance(weighted) if alone is None else alone


def _weighted(value: Any) -> Any:
    """A schema in which each value is as long as its bounds on sizes allow it to be."""
    if isinstance(value, list):
        return list(map(_weighted, value))
    if not isinstance(value, dict):
        return value
    weighted = {name: _weighted(member) for name, member in value.items()}
    least = sum(len(str(value[name])) for name in _NUMERIC if isinstance(value.get(name), int | float))
    if isinstance(value.get("format"), str):
        least = max(least, _FORMATTED)
    if isinstance(pattern := value.get("pattern"), str):
        least = max(least, width(pattern))
    if least:
        weighted["allOf"] = [*value.get("allOf", ()), {"type": "string", "minLength": least}]
    return weighted


def members(values: list[Any]) -> Iterator[tuple[int, str, Any]]:
    """(depth, name, value) of all members of all objects, whatever they mean there."""
    left = [(0, value) for value in values]
    while left:
        depth, value = left.pop()
        if isinstance(value, dict):
            yield from ((depth, name, member) for name, member in value.items())
            left += ((depth + 1, member) for member in value.values() if isinstance(member, dict | list))
        elif isinstance(value, list):
            left += ((depth + 1, item) for item in value if isinstance(item, dict | list))


def is_plain(pattern: str) -> bool:
    """Whether a regular expression has at most one open repetition, and none of a group."""
    if len(pattern) > _PATTERN or _GROUP_REPEATED.search(pattern):
        return False
    return _counted(pattern) <= _REPEATED and len(_UNBOUNDED.findall(pattern)) <= 1


def width(pattern: str) -> int:
    """An upper bound of the shortest text that matches a pattern without repeated groups, in characters."""
    return len(_CLASS.sub("x", _COUNTED.sub("", pattern))) + _counted(pattern)


def _counted(pattern: str) -> int:
    return sum(int(most or least or 0) for least, _, most in _COUNTED.findall(pattern))
