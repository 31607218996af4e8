"""Rewrites patterns of property names that overlap as patterns that do not."""

from itertools import combinations
from typing import Any

import jsonschema_rs

from personae.grammar.regex.parse import NotRegular
from personae.grammar.regex.plain import NOTHING, some_text
from personae.grammar.schema.document import for_library
from personae.grammar.schema.patterns import anything_but, language
from personae.grammar.schema.walk import rebuild

_MOST = 4


def without_overlaps(schema: Any, *, listed: bool = False) -> Any:
    """An equal schema in which no name matches two patterns of an object, as far as that is known to be
    possible. With `listed`, no listed name matches a pattern either. The schema itself if nothing
    overlaps."""
    if not isinstance(schema, dict):
        return schema
    rebuilt = rebuild(schema, lambda _, child: without_overlaps(child, listed=listed))
    patterns = rebuilt.get("patternProperties", {})
    if listed and patterns:
        rebuilt |= _unlisted(rebuilt)
    if 1 < len(patterns) <= _MOST and _overlap(patterns):
        parts = _parts(rebuilt["patternProperties"])
        if parts is not None:
            return rebuilt | {"patternProperties": parts}
    same = rebuilt.keys() == schema.keys() and all(rebuilt[keyword] == schema[keyword] for keyword in schema)
    return schema if same else rebuilt


def _unlisted(schema: dict[str, Any]) -> dict[str, Any]:
    """The properties and patterns of an object, with names that are listed taken from the patterns."""
    properties, patterns = schema.get("properties", {}), {}
    names = dict.fromkeys((*properties, *schema.get("required", ())))
    found: dict[str, list[Any]] = {}
    for pattern, one in schema["patternProperties"].items():
        judge = jsonschema_rs.validator_for(for_library({"pattern": pattern}))
        matching = [name for name in names if judge.is_valid(name)]
        for name in matching:
            found.setdefault(name, [properties[name]] if name in properties else []).append(one)
        other = pattern
        if matching:
            other = language({"allOf": [{"pattern": pattern}, {"pattern": anything_but(matching)}]}) or ""
            if not other:
                return {}
        if other != NOTHING:
            patterns[other] = one
    if not found:
        return {}
    together = {name: many[0] if len(many) == 1 else {"allOf": many} for name, many in found.items()}
    return {"properties": properties | together, "patternProperties": patterns}


def _overlap(patterns: dict[str, Any]) -> bool:
    try:
        return any(some_text(pair) for pair in combinations(patterns, 2))
    except NotRegular:
        return False


def _parts(patterns: dict[str, Any]) -> dict[str, Any] | None:
    """One pattern for each combination of patterns that a name may match. None if one is not known."""
    parts: dict[str, Any] = {}
    for size in range(len(patterns), 0, -1):
        for matched in combinations(patterns, size):
            barred = [{"not": {"pattern": one}} for one in patterns if one not in matched]
            pattern = language({"allOf": [*({"pattern": one} for one in matched), *barred]})
            if pattern is None:
                return None
            schemas = [patterns[one] for one in matched]
            if pattern != NOTHING:
                parts[pattern] = schemas[0] if len(schemas) == 1 else {"allOf": schemas}
    return parts
