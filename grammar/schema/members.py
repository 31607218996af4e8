"""Rewrites what a schema says of members and numbers into the form that `tracked/` uses."""

from contextlib import suppress
from typing import Any

import jsonschema_rs

from personae.grammar.schema.canonical import canonicalise
from personae.grammar.schema.formats import spell_formats
from personae.grammar.schema.gate import ASSERTIONS, strip
from personae.grammar.schema.patterns import endless, plain_patterns
from personae.grammar.schema.walk import DISTINCT, FRACTION, HITS, NAMES, SET, rebuild, subschemas, target
from personae.grammar.tracked.arrays import listed_values
from personae.grammar.tracked.listed_names import beginning
from personae.grammar.tracked.objects import too_many
from personae.grammar.tracked.support import BITS, has_order

_DEPTH = 8


def separated(document: Any) -> Any:
    """An equal schema in which `contains` has become two schemas: one for the items that it counts, one for
    those that it does not. Ambiguous ones stay as they are, and the gate finds them."""
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
    if rebuilt.get("uniqueItems") and _is_set_of_values(rebuilt, definitions):
        del rebuilt["uniqueItems"]
        rebuilt[DISTINCT] = True
    if _counts_free_names(rebuilt):
        rebuilt[NAMES] = True
    dependencies = rebuilt.get("dependencies")
    if isinstance(dependencies, dict) and all(isinstance(one, list) for one in dependencies.values()):
        del rebuilt["dependencies"]
        if "dependentRequired" not in rebuilt:
            rebuilt["dependentRequired"] = dependencies
    if rebuilt.get("type") == "number":
        rebuilt = _fractional(rebuilt)
    if "contains" not in rebuilt:
        for keyword in ("minContains", "maxContains"):
            if HITS not in rebuilt:
                rebuilt.pop(keyword, None)
        return rebuilt
    with suppress(Exception):  # there is no such form, whatever the library's error
        return _without_contains(rebuilt, definitions)
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
    if rebuilt.pop(SET, False) or rebuilt.pop(DISTINCT, False):
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


def _is_set_of_values(schema: dict[str, Any], definitions: dict[str, Any]) -> bool:
    """Whether an array's items may be compared one by one, and are not so few that bits can record them."""
    types = schema.get("type")
    is_array = types == "array" or (isinstance(types, list) and "array" in types)
    others = {"prefixItems", "contains", "allOf", "anyOf", "oneOf", "not", "$ref", "enum", "const", HITS}
    if not is_array or others & schema.keys() or isinstance(schema.get("items"), list):
        return False
    values = listed_values(definitions, schema.get("items", True))
    return values is None or len(values) > BITS


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


def _fractional(schema: dict[str, Any]) -> dict[str, Any]:
    """Numbers that are not whole, within bounds that are."""
    bounds = [value for keyword, value in schema.items() if "imum" in keyword]
    if schema.get("not") != {"multipleOf": 1} or not all(float(one).is_integer() for one in bounds):
        return schema
    return {keyword: value for keyword, value in schema.items() if keyword != "not"} | {FRACTION: True}


def _without_contains(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    least, most = schema.get("minContains", 1), schema.get("maxContains")
    rest = {key: value for key, value in schema.items() if not key.endswith("ontains")}
    if least == 0 and most is None:
        return rest
    items, contained = schema.get("items", True), schema["contains"]
    if isinstance(items, list) or "prefixItems" in schema:
        return schema
    hits = contained if items is True else _both(items, contained, definitions)
    counts = {HITS: hits, "minContains": least, **({} if most is None else {"maxContains": most})}
    if most is not None:
        rest["items"] = _both(items, {"not": contained}, definitions)
    return rest | counts


def _both(one: Any, other: Any, definitions: dict[str, Any]) -> Any:
    """A schema without references for what satisfies both. Raises ValueError if it would have references."""
    both = {"allOf": [one, other]}
    if "$schema" in definitions:  # else the definitions may decide which draft it is
        definitions = _referred(both, definitions)
    found = spell_formats(plain_patterns(strip(canonicalise({**definitions, **both}))))
    if isinstance(found, dict) and "$defs" in found:
        raise ValueError("it refers to others")
    return found


def _referred(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Those of the definitions to which a schema refers, in their order. All of them if a reference leads
    elsewhere."""
    named: set[tuple[str, str]] = set()
    unseen: list[Any] = [schema]
    while unseen:
        for one, _ in subschemas(unseen.pop()):
            if "$ref" not in one:
                continue
            _, home, name, *rest = (*str(one["$ref"]).split("/"), "", "")
            if home not in ("$defs", "definitions") or any(rest) or name not in definitions.get(home, ()):
                return definitions
            if (home, name) not in named:
                named.add((home, name))
                unseen.append(definitions[home][name])
    kept = {
        home: {name: one for name, one in definitions[home].items() if (home, name) in named}
        for home in ("$defs", "definitions")
        if home in definitions
    }
    return definitions | kept
