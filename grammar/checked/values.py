"""What an answer to a schema may have to contain: the names and values that the schema mentions, and a value
for each schema in it."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from personae.grammar.budget.regexes import pattern_distances
from personae.grammar.checked.pattern_endings import ending
from personae.grammar.schema.document import Schema
from personae.grammar.schema.formats import spell_formats
from personae.grammar.schema.prepare import ANALYSIS_ERRORS
from personae.grammar.schema.walk import subschemas, target

_LONGEST = 400  # characters of a value
_DEEP = 6
_MOST_ITEMS = 16
_MOST_PATTERNS = 8
_OF_TYPE: dict[str, Any] = {
    "null": None,
    "boolean": True,
    "integer": 0,
    "number": 0,
    "string": "",
    "array": [],
    "object": {},
}
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class Mentioned(NamedTuple):
    """Names of properties, values as JSON, members as JSON, which are a name and a value that fits it, and
    patterns of names and values: all of those in one tuple together."""

    names: list[str]
    values: list[str]
    members: list[str]
    patterns: list[tuple[str, ...]]

    def then(self, other: "Mentioned") -> "Mentioned":
        """Both, these first."""
        return Mentioned(
            [*dict.fromkeys((*self.names, *other.names))],
            [*dict.fromkeys((*self.values, *other.values))],
            [*dict.fromkeys((*self.members, *other.members))],
            [*dict.fromkeys((*self.patterns, *other.patterns))],
        )


USUAL = Mentioned(
    ["a", "b", "c", "d", "e", "f"],
    [
        *("null", "true", "false", "0", "1", "2", "-1", '""', '"a"', '"b"', "[]", "{}", "0.5", "[0]"),
        *('{"a":0}', '"a.io"', '"1.0"'),
    ],
    [],
    [],
)


def mentioned(schema: Any, document: Schema, most: int) -> Mentioned:
    """What a part of a document mentions, the outermost first: at most so many of each."""
    names: dict[str, None] = {}
    values: dict[str, None] = {}
    members: dict[str, None] = {}
    patterns: dict[tuple[str, ...], None] = {}
    for one, _ in subschemas(schema):
        if len(names) >= most and len(values) >= most:
            break
        names |= dict.fromkeys(_names(one))
        values |= dict.fromkeys(filter(None, map(_written, _values(one, document))))
        patterns |= dict.fromkeys(_patterns(one))
        if isinstance(listed := one.get("properties"), dict):
            for name, child in listed.items():
                if value := _written(likely(child, document)):
                    members.setdefault(f"{_written(name)}:{value}")
    return Mentioned(
        [*names][:most], [*values][:most], [*members][:most], [*patterns][: min(most, _MOST_PATTERNS)]
    )


def _written(value: Any) -> str:
    """The value as JSON; empty if it is long."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if len(text) <= _LONGEST else ""


def _names(schema: dict[str, Any]) -> Iterator[str]:
    for keyword in ("properties", "dependentRequired", "dependentSchemas", "dependencies"):
        if isinstance(named := schema.get(keyword), dict):
            yield from named
            for value in named.values():
                if isinstance(value, list):
                    yield from (name for name in value if isinstance(name, str))
    if isinstance(required := schema.get("required"), list):
        yield from (name for name in required if isinstance(name, str))
    if isinstance(named := schema.get("patternProperties"), dict):
        yield from filter(None, map(_example, named))
    if isinstance(named := schema.get("propertyNames"), dict):
        yield from (name for name in (*named.get("enum", ()), named.get("const")) if isinstance(name, str))


def _patterns(schema: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    found = [schema.get("pattern")]
    if isinstance(format := schema.get("format"), str):
        found.append(spell_formats({"format": format}).get("pattern"))
    least = schema.get("minLength")
    if isinstance(least, int) and 0 < least <= _LONGEST:
        found.append(f"^[^]{{{least},}}$")
    if texts := tuple(one for one in found if isinstance(one, str)):
        yield texts
    if isinstance(named := schema.get("patternProperties"), dict):
        yield from ((name,) for name in named)


def _values(schema: dict[str, Any], document: Schema) -> Iterator[Any]:
    if "const" in schema:
        yield schema["const"]
    for keyword in ("enum", "examples"):
        if isinstance(listed := schema.get(keyword), list):
            yield from listed
    if "default" in schema:
        yield schema["default"]
    for keyword in _NUMBERS:
        number = schema.get(keyword)
        if isinstance(number, int | float) and not isinstance(number, bool):
            yield number
            if isinstance(number, int):
                yield from (number + 1, number - 1)
    yield likely(schema, document)


def _example(pattern: str) -> str:
    """A text that matches a pattern; empty if none is known."""
    try:
        return pattern_distances(pattern).example
    except ANALYSIS_ERRORS:
        return ""


def likely(schema: Any, document: Schema, depth: int = 0) -> Any:
    """A short value that the schema might accept. Many keywords are ignored."""
    if not isinstance(schema, dict) or depth > _DEEP:
        return 0
    if "$ref" in schema:
        return likely(target(document, schema["$ref"]), document, depth + 1)
    if "const" in schema:
        return schema["const"]
    for keyword in ("enum", "examples"):
        if isinstance(listed := schema.get(keyword), list) and listed:
            return listed[0]
    for keyword in ("allOf", "anyOf", "oneOf"):
        if isinstance(listed := schema.get(keyword), list) and listed:
            rest = {name: value for name, value in schema.items() if name != keyword}
            first = listed[0] if isinstance(listed[0], dict) else {}
            return likely({**first, **rest}, document, depth + 1)
    return _of_type(schema, document, depth)


def _of_type(schema: dict[str, Any], document: Schema, depth: int) -> Any:
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = kind[0] if kind else None
    if kind is None:
        objects, arrays = {"properties", "required", "minProperties"}, {"items", "prefixItems", "minItems"}
        kind = "object" if objects & schema.keys() else "array" if arrays & schema.keys() else "null"
    if kind == "object":
        listed = schema.get("properties", {})
        names = [name for name in schema.get("required", ()) if isinstance(name, str)]
        return {name: likely(listed.get(name), document, depth + 1) for name in names[:_MOST_ITEMS]}
    if kind == "array":
        items = schema.get("items")
        least = schema.get("minItems", 1 if "contains" in schema else 0)
        one = schema.get("contains", items)
        return [likely(one, document, depth + 1) for _ in range(min(int(least), _MOST_ITEMS))]
    if kind in ("integer", "number"):
        return schema.get("minimum", schema.get("maximum", 0))
    if kind == "string":
        if isinstance(pattern := schema.get("pattern"), str) and (found := _example(pattern)):
            short = len(found) < int(schema.get("minLength", 0))
            return (short and ending(next(_patterns(schema)), "")) or found
        if isinstance(format := schema.get("format"), str):
            spelled = spell_formats({"type": "string", "format": format}).get("pattern")
            return _example(spelled) if isinstance(spelled, str) else ""
        return "a" * min(int(schema.get("minLength", 0)), _LONGEST)
    return _OF_TYPE.get(str(kind))
