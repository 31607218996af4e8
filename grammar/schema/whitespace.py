"""The blanks between two tokens of JSON: few, but enough to indent as deep as a schema is nested."""

import math
from typing import Any

import msgspec

from personae.grammar.schema.document import MAX_DEPTH, MAX_WHITESPACE
from personae.grammar.schema.walk import target

MAX_INDENT = 64  # spaces, for answers of any depth
MOST_BLANKS = MAX_INDENT + 2
"""The most blanks between two tokens of JSON, in any schema."""
_OF_A_LEVEL = 4
_LARGE = 100_000  # characters; a longer schema is not read for this
_ITEMS = ("items", "prefixItems", "additionalItems")
_IN_PLACE = ("anyOf", "oneOf", "allOf")


def whitespace_pattern(source: str) -> str:
    """A regular expression for the blanks in JSON: up to MAX_WHITESPACE of any kind, or a line break and the
    spaces of the schema's deepest level, four for each level, or as many tabs as levels."""
    indent = MAX_INDENT if len(source) > _LARGE else indent_of(msgspec.json.decode(source))
    if indent < MAX_WHITESPACE:
        return f"[ \\n\\r\\t]{{1,{MAX_WHITESPACE}}}"
    tabs = max(indent // _OF_A_LEVEL, 1)
    return f"(?:[ \\n\\r\\t]{{1,{MAX_WHITESPACE}}}|\\r?\\n(?: {{1,{indent}}}|\\t{{1,{tabs}}}))"


def indent_of(schema: Any) -> int:
    """The spaces before the innermost part of an answer, at most MAX_INDENT."""
    return int(min(_OF_A_LEVEL * _Levels(schema).of(schema, 0), MAX_INDENT))


class _Levels:
    """The depth to which objects and arrays can be nested; infinite if it is not bounded."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, float] = {}

    def of(self, schema: Any, depth: int) -> float:
        """The depth of values that satisfy `schema`, which is at this depth of the document and its
        references."""
        if not isinstance(schema, dict):
            return 0 if schema is False else math.inf
        if depth > MAX_DEPTH:
            return math.inf
        if id(schema) not in self._known:
            self._known[id(schema)] = math.inf  # for everything that leads back to it
            self._known[id(schema)] = self._of(schema, depth + 1)
        return self._known[id(schema)]

    def _of(self, schema: dict[str, Any], depth: int) -> float:
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return max(map(_depth, values), default=0)
        parts = [one for name in _IN_PLACE for one in schema.get(name) or ()]
        if "$ref" in schema:
            parts.append(target(self._root, schema["$ref"]))
        deepest = max((self.of(one, depth) for one in parts), default=math.inf)
        if parts and "type" not in schema:
            return deepest
        kinds = schema.get("type", ["object"])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        return min(deepest, max((self._of_type(kind, schema, depth) for kind in kinds), default=0.0))

    def _of_type(self, kind: str, schema: dict[str, Any], depth: int) -> float:
        inner: list[Any] = []
        if kind == "object":
            inner = [schema.get("additionalProperties", True)]
            for name in ("properties", "patternProperties"):
                inner += (schema.get(name) or {}).values()
        elif kind == "array":
            for name in _ITEMS:
                value = schema.get(name, name == "items")
                inner += value if isinstance(value, list) else [value]
        return 1 + max(self.of(one, depth) for one in inner) if inner else 0


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)
