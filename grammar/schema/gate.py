"""The gate: closed by default. A keyword passes only where the backend is known to enforce it."""

import re
from typing import Any

from personae.errors import GrammarError
from personae.grammar.schema.document import SCHEMA_PARAM, Schema, pointer

# Say nothing about which instances are valid.
ANNOTATIONS = frozenset(
    {
        "$schema",
        "$id",
        "id",
        "$comment",
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
    }
    | {"writeOnly", "$defs", "definitions"}
)

# What xgrammar enforces of a schema that has this one type.
_BY_TYPE = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "string": frozenset[str](),  # under a length it would let through raw control characters
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset[str](),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_ALONE = ("$ref", "anyOf", "enum", "const")


def require_enforced(schema: Schema) -> None:
    """Raise GrammarError, naming the keyword and its JSON pointer, unless xgrammar enforces all of it."""
    _require(schema, [])


def _require(schema: Schema, path: list[str | int]) -> None:
    if isinstance(schema, bool):
        if not schema:
            raise _refusal("false", path)
        return
    keywords = [key for key in schema if key not in ANNOTATIONS]
    values = schema["enum"] if "enum" in schema else [schema.get("const")]
    if set(keywords) in ({"type", "enum"}, {"type", "const"}) and all(
        _is_a(value, schema["type"]) for value in values
    ):
        return
    if len(keywords) == 1 and keywords[0] in _ALONE:
        keyword = keywords[0]
        if keyword == "$ref" and not re.match("#(/|$)", str(schema["$ref"])):
            raise _refusal("$ref", [*path, "$ref"])
        for index, branch in enumerate(schema[keyword] if keyword == "anyOf" else ()):
            _require(branch, [*path, "anyOf", index])
    elif keywords:
        _require_type(schema, keywords, path)
    for holder in ("$defs", "definitions"):
        for name, definition in schema.get(holder, {}).items():
            _require(definition, [*path, holder, name])


def _require_type(schema: dict[str, Any], keywords: list[str], path: list[str | int]) -> None:
    kind = schema.get("type")
    for keyword in keywords:
        if keyword != "type" and (not isinstance(kind, str) or keyword not in _BY_TYPE[kind]):
            raise _refusal(keyword, [*path, keyword])
    for name, value in schema.get("properties", {}).items():
        _require(value, [*path, "properties", name])
    for keyword in ("items", "additionalProperties"):
        if schema.get(keyword, False) is not False:
            _require(schema[keyword], [*path, keyword])
    missing = set(schema.get("required", ())) - set(schema.get("properties", {}))
    if missing:
        raise _refusal("required", [*path, "required"])


def _is_a(value: Any, kind: Any) -> bool:
    types = _PYTHON_TYPES.get(kind, ()) if isinstance(kind, str) else ()
    return isinstance(value, types) and (isinstance(value, bool) == (kind == "boolean"))


def _refusal(keyword: str, path: list[str | int]) -> GrammarError:
    return GrammarError(
        f"The keyword {keyword!r} at {pointer(path)} cannot be enforced here; "
        'remove it, or send "strict": false for an answer that follows the schema as far as possible.',
        param=SCHEMA_PARAM,
    )
