"""Rewrites patterns of property names that overlap as patterns that do not."""

from itertools import combinations
from typing import Any

from personae.grammar.regex.parse import NotRegular
from personae.grammar.regex.plain import NOTHING, plain
from personae.grammar.schema.patterns import language
from personae.grammar.schema.walk import rebuild

_MOST = 4


def without_overlaps(schema: Any) -> Any:
    """An equal schema in which no name matches two patterns of an object, as far as that is known to be
    possible. The schema itself if nothing overlaps."""
    if not isinstance(schema, dict):
        return schema
    rebuilt = rebuild(schema, lambda _, child: without_overlaps(child))
    patterns = rebuilt.get("patternProperties", {})
    if 1 < len(patterns) <= _MOST and _overlap(patterns):
        parts = _parts(patterns)
        if parts is not None:
            return rebuilt | {"patternProperties": parts}
    same = all(rebuilt[keyword] == schema[keyword] for keyword in schema)
    return schema if same else rebuilt


def _overlap(patterns: dict[str, Any]) -> bool:
    try:
        return any(plain(pair) is not None for pair in combinations(patterns, 2))
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
