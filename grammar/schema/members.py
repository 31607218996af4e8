"""Rewrites what a schema says of members into the form that `tracked/` uses."""

from typing import Any

import jsonschema_rs

from personae.grammar.schema.gate import ASSERTIONS
from personae.grammar.schema.patterns import endless
from personae.grammar.schema.walk import NAMES, SET, rebuild, target
from personae.grammar.tracked.listed_names import beginning
from personae.grammar.tracked.objects import too_many
from personae.grammar.tracked.support import has_order

_DEPTH = 8


def separated(document: Any) -> Any:
    """An equal schema in which what is tracked is marked, and what says nothing is left out."""
    definitions = (
        {key: document[key] for key in ("$defs", "definitions", "$schema") if key in document}
        if isinstance(document, dict)
        else {}
    )
    return _separated(document, definitions)


def _separated(schema: Any, definitions: dict[str, Any]) -> Any:
    if not isinstance(schema, dict):
        return schema
    rebuilt = rebuild(schema, lambda _, child: _separated(child, definitions))
    if not isinstance(rebuilt.get("items"), list):
        rebuilt.pop("additionalItems", None)  # without a list it says nothing
    if rebuilt.get("uniqueItems") and rebuilt.get("maxItems", 2) <= 1:
        del rebuilt["uniqueItems"]
    if rebuilt.get("uniqueItems") and _is_set_of_texts(rebuilt, definitions):
        del rebuilt["uniqueItems"]
        rebuilt[SET] = True
    if _counts_free_names(rebuilt):
        rebuilt[NAMES] = True
    dependencies = rebuilt.get("dependencies")
    if isinstance(dependencies, dict) and all(isinstance(one, list) for one in dependencies.values()):
        del rebuilt["dependencies"]
        if "dependentRequired" not in rebuilt:
            rebuilt["dependentRequired"] = dependencies
    if rebuilt.get("minContains") == 0 and "maxContains" not in rebuilt:
        rebuilt.pop("contains", None)
    if "contains" not in rebuilt:
        rebuilt.pop("minContains", None)
        rebuilt.pop("maxContains", None)
    return rebuilt


def objects_spelled_out(schema: Any) -> Any:
    """An equal schema, in which a listed value that is or holds an object of several properties has become a
    schema of its members."""
    if not isinstance(schema, dict):
        return schema
    is_set = bool(schema.get("uniqueItems"))  # bits record its listed items
    rebuilt = rebuild(
        schema, lambda step, child: child if is_set and step[0] == "items" else objects_spelled_out(child)
    )
    listed = [rebuilt["const"]] if "const" in rebuilt else rebuilt.get("enum", ())
    said = rebuilt.keys() & ASSERTIONS
    if not any(map(has_order, listed)) or not (said <= {"type", "enum"} or said <= {"type", "const"}):
        return rebuilt
    if "type" in rebuilt:
        listed = [value for value in listed if jsonschema_rs.is_valid({"type": rebuilt["type"]}, value)]
    rest = {keyword: value for keyword, value in rebuilt.items() if keyword not in said}
    ways = [_of_value(value) for value in listed if has_order(value)]
    plain = [value for value in listed if not has_order(value)]
    return rest | {"anyOf": [*([{"enum": plain}] if plain else []), *ways]}


def _of_value(value: Any) -> dict[str, Any]:
    """The schema of one value."""
    if isinstance(value, dict):
        properties = {name: _of_value(one) for name, one in value.items()}
        closed = {"required": list(value), "additionalProperties": False}
        return {"type": "object", "properties": properties, **closed}
    if isinstance(value, list):
        count = len(value)
        first = {"prefixItems": [_of_value(one) for one in value], "items": False} if value else {}
        return {"type": "array", **first, "minItems": count, "maxItems": count}
    return {"const": value}


def named_once(schema: Any) -> Any:
    """The schema with a mark on objects with more properties than there are bits: none may come twice."""
    if not isinstance(schema, dict):
        return schema
    rebuilt = rebuild(schema, lambda _, child: named_once(child))
    patterns = rebuilt.get("patternProperties", {})
    closed = rebuilt.get("additionalProperties", True) is False
    # Names of which it is not known whether they are left could lead to where nothing may follow.
    known = all(one is not False for one in patterns.values())
    if closed:
        known = known and all(beginning(pattern) is not None for pattern in patterns)
    return rebuilt | {NAMES: True} if known and too_many(rebuilt) else rebuilt


def sets_as_written(schema: Any) -> Any:
    """The schema with uniqueItems again, because nothing reads along if an answer is more than its JSON."""
    if not isinstance(schema, dict):
        return schema
    rebuilt = rebuild(schema, lambda _, child: sets_as_written(child))
    rebuilt.pop(NAMES, None)
    if rebuilt.pop(SET, False):
        rebuilt["uniqueItems"] = True
    return rebuilt


def _counts_free_names(schema: dict[str, Any]) -> bool:
    """Whether an object must have several properties that are not listed, whose names can always continue in
    a way that was not written."""
    if schema.get("type") != "object" or schema.get("minProperties", 0) < 2:
        return False
    listed = {name for name, one in schema.get("properties", {}).items() if one is not False}
    if schema.get("minProperties", 0) <= len(listed & {*schema.get("required", ())}) + 1:
        return False
    patterns, others = schema.get("patternProperties", {}), schema.get("additionalProperties", True)
    if others is not False:
        return all(one is not False for one in patterns.values())
    return len(patterns) == 1 and all(one is not False and endless(name) for name, one in patterns.items())


def _is_set_of_texts(schema: dict[str, Any], definitions: dict[str, Any]) -> bool:
    """Whether an array's items are strings that can continue in more than one way, whatever their
    beginning."""
    items: Any = schema.get("items")
    for _ in range(_DEPTH):
        if isinstance(items, dict) and "$ref" in items:
            items = target(definitions, items["$ref"])
    types = schema.get("type")
    is_array = types == "array" or (isinstance(types, list) and "array" in types)
    others = {"prefixItems", "contains", "allOf", "anyOf", "oneOf", "not", "$ref", "enum", "const"}
    if not is_array or others & schema.keys() or not isinstance(items, dict):
        return False
    return items.get("type") == "string" and items.keys() <= {"type", "minLength"}
