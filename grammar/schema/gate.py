"""The gate is closed by default: a keyword passes only if a backend is known to enforce all of it.

What a backend enforces was found by probing it, not by reading what it claims.
tests/grammar/schema/test_gate.py repeats the probes.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from personae.grammar.schema.document import Schema
from personae.grammar.schema.formats import FORMATS
from personae.grammar.schema.walk import HITS, NAMES, Path, rebuild, subschemas
from personae.grammar.tracked.arrays import array_rules
from personae.grammar.tracked.objects import object_rules, too_many
from personae.grammar.tracked.support import ARRAY, OBJECT, Untracked

# Every keyword of every draft that binds instances. JSON Schema does not know others, and they bind nothing.
ASSERTIONS = frozenset(
    {
        "type",
        "enum",
        "const",
        "$ref",
        "$dynamicRef",
        "$recursiveRef",
        "$dynamicAnchor",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
    }
    | {"then", "else", "properties", "patternProperties", "additionalProperties", "propertyNames", "required"}
    | {"minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"}
    | {"unevaluatedProperties", "unevaluatedItems", "items", "prefixItems", "additionalItems", "contains"}
    | {"minContains", "maxContains", "minItems", "maxItems", "uniqueItems", "minimum", "maximum"}
    | {"exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern", "format"}
    | {"extends", "disallow", "divisibleBy"}
)

# Keywords by which one schema finds another.
_NAMES = frozenset({"$schema", "$id", "id", "$anchor", "$defs", "definitions"})


@dataclass(frozen=True, slots=True)
class Unenforced:
    """A keyword that would be ignored, where it stands, and its value."""

    keyword: str
    path: Path
    value: Any


def strip(schema: Any) -> Any:
    """The schema without everything that binds nothing: annotations, unknown keywords and formats, empty
    conditions."""
    if not isinstance(schema, dict):
        return schema
    return rebuild(
        {keyword: value for keyword, value in schema.items() if _binds(keyword, value)},
        lambda _, child: strip(child),
    )


def _binds(keyword: str, value: Any) -> bool:
    if keyword == "format":
        return value in FORMATS
    if keyword in ("uniqueItems", "minProperties", "minItems", "minLength"):
        return bool(value)
    return keyword in ASSERTIONS or keyword in _NAMES


def unenforced(schema: Schema, backend: str) -> Iterator[Unenforced]:
    """The keywords of a schema that `backend` would ignore, outermost first."""
    enforces = _BACKENDS[backend]
    for one, path in subschemas(schema):
        for keyword, value in one.items():
            if keyword in ASSERTIONS and not enforces(keyword, one, schema):
                yield Unenforced(keyword, (*path, keyword), value)


_LLGUIDANCE = frozenset(
    {"type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf", "properties", "patternProperties"}
    | {
        "additionalProperties",
        "required",
        "maxProperties",
        "items",
        "prefixItems",
        "additionalItems",
        "minItems",
    }
    | {"maxItems", "minLength", "maxLength", "pattern"}
)
# It lets invalid strings through for the other formats; formats.py writes those as patterns.
_LLGUIDANCE_FORMATS = frozenset({"duration", "ipv4", "ipv6", "uuid", "uri"})


# It holds four states for each optional property of an object, and stops the answer at 2,000 states. Masks
# are slow long before: 20 ms at 1,000 properties.
_MOST_OPTIONAL = 450

# It goes through as many states for the multiples of a whole number before its first answer: a second for
# this one. Those of fractions are found sooner.
_MOST_MULTIPLE = 100_000

# What JSON can only write as \\u and four digits, which is switched off (backends/llguidance.py).
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_UNWRITABLE_ESCAPE = re.compile(r"\\(?:u00|x)(0[0-7be]|1[0-9a-f]|7f)", re.IGNORECASE)


def _llguidance_enforces(keyword: str, schema: dict[str, Any], document: Schema) -> bool:
    """The library also refuses by itself what it cannot follow, such as oneOf with branches that may
    overlap."""
    value = schema[keyword]
    if keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        return is_exact(value)
    if keyword == "multipleOf":
        return is_exact(value) and _common_multiple([schema]) <= _MOST_MULTIPLE
    if keyword == "allOf":
        return _common_multiple([schema, *value]) <= _MOST_MULTIPLE
    if keyword == "properties":
        return _is_writable(list(value)) and len(value.keys() - schema.get("required", ())) <= _MOST_OPTIONAL
    if keyword in ("enum", "const", "required"):
        return _is_writable(value)
    if keyword == "format":
        return value in _LLGUIDANCE_FORMATS
    if keyword in ("minProperties", "maxProperties", "dependentRequired"):
        alone = keyword != "dependentRequired" and counts_properties(schema)
        return alone or ("object" in _types(schema) and _is_tracked("object", schema, document))
    if keyword in ("uniqueItems", "minContains", "maxContains"):
        return "array" in _types(schema) and _is_tracked("array", schema, document)
    return keyword in _LLGUIDANCE


def _types(schema: dict[str, Any]) -> list[Any]:
    kind = schema.get("type", [])
    return kind if isinstance(kind, list) else [kind]


def _is_tracked(kind: str, schema: dict[str, Any], document: Schema) -> bool:
    """Whether the schema's members can be counted, judged by its own keywords."""
    keywords = OBJECT if kind == "object" else ARRAY
    alone = {keyword: value for keyword, value in schema.items() if keyword in keywords}
    if {"$ref", "anyOf", "allOf", "oneOf", "not", "enum", "const"} & schema.keys():
        return False
    if kind == "array" and not (schema.get("uniqueItems") or HITS in schema):
        return False
    try:
        if kind == "object":
            by_name = NAMES in alone and too_many(alone)  # which is only so in any order
            rules = object_rules(alone, lambda _: "", "", any_order=by_name)
        else:
            rules = array_rules(document, alone, lambda _: "", "")
        return any(True for _ in rules)
    except Untracked:
        return False


def _common_multiple(schemas: list[Any]) -> int:
    """The least whole number that satisfies every `multipleOf` of schemas, but for fractions."""
    steps = [one["multipleOf"] for one in schemas if isinstance(one, dict) and "multipleOf" in one]
    return math.lcm(*(int(step) for step in steps if step % 1 == 0))


def is_exact(number: float) -> bool:
    """Whether a number is the same as a double, which is how grammars read it."""
    try:
        return abs(number) <= 2**53 or float(number) == number
    except OverflowError:
        return False


def _is_writable(value: Any) -> bool:
    """Whether all strings within can be written: the library omits characters that it cannot write."""
    if isinstance(value, str):
        return _UNWRITABLE.search(value) is None
    if isinstance(value, dict):
        return all(_is_writable(name) and _is_writable(one) for name, one in value.items())
    return not isinstance(value, list) or all(map(_is_writable, value))


def unwritable(value: Any) -> str | None:
    """The first character of the strings within, or of what their escapes stand for, that no answer has."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return next((found for one in value if (found := unwritable(one)) is not None), None)
    if not isinstance(value, str):
        return None
    character, escape = _UNWRITABLE.search(value), _UNWRITABLE_ESCAPE.search(value)
    return character[0] if character else chr(int(escape[1], 16)) if escape else None


def counts_properties(schema: dict[str, Any]) -> bool:
    """Whether llguidance itself enforces the number of an object's properties."""
    required = set(schema.get("required", ()))
    listed = {name for name, one in schema.get("properties", {}).items() if one is not False}
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    fewest = max(0, schema.get("minProperties", 0) - len(required))
    if not closed and fewest > 1:
        return False  # a property that is not listed may be written twice, and counts once then
    if not listed - required or ("maxProperties" not in schema and not fewest):
        return True
    return closed and fewest <= 1 and schema.get("maxProperties", len(required) + 1) == len(required) + 1


def _xgrammar_enforces(keyword: str, schema: dict[str, Any], _: Schema) -> bool:
    """With lengths and patterns it allows raw control characters, and in open objects it allows listed names
    with escapes."""
    value = schema[keyword]
    if keyword == "additionalProperties":
        return value is False or not schema.get("properties")
    if keyword in ("$ref", "anyOf", "enum", "const"):
        return not any(other in ASSERTIONS for other in schema if other != keyword)
    if keyword in ("properties", "required"):
        listed = schema.get("properties", {})
        return schema.get("additionalProperties") is False and set(schema.get("required", ())) <= set(listed)
    if keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        return schema.get("type") == "integer" and isinstance(value, int) and is_exact(value)
    if keyword in ("items", "minItems", "maxItems"):
        return schema.get("type") == "array" and not isinstance(value, list)
    return keyword == "type" and isinstance(value, str)


_BACKENDS: dict[str, Callable[[str, dict[str, Any], Schema], bool]] = {
    "llguidance": _llguidance_enforces,
    "xgrammar": _xgrammar_enforces,
}
