"""Decides which schemas need their members tracked, and which of them can have it.

The grammar library writes the properties of an object in the schema's order, and counts nothing but items.
For anything beyond that, `writer.py` writes rules that carry 64 bits: which members are already there, and
how many.
"""

from collections.abc import Callable
from typing import Any

from personae.grammar.schema.document import Schema
from personae.grammar.schema.walk import DISTINCT, FRACTION, HITS, NAMES, SET, children, rebuild, target

BITS = 64
COUNTED = frozenset(
    {"uniqueItems", "minProperties", "maxProperties", "dependentRequired", HITS, FRACTION, DISTINCT, NAMES}
)
OBJECT = frozenset(
    {"type", "properties", "required", "additionalProperties", "patternProperties", "minProperties"}
    | {"maxProperties", "dependentRequired", NAMES}
)
ARRAY = frozenset(
    {
        "type",
        "items",
        "prefixItems",
        "additionalItems",
        "minItems",
        "maxItems",
        "uniqueItems",
        "minContains",
        "maxContains",
        HITS,
        DISTINCT,
    }
)
AROUND = frozenset({SET, "$defs", "definitions", "$schema", "$id", "id", "$anchor", "title", "description"})


Leaf = Callable[[Any], str]
"""The right side of a rule for a schema that is left to the library."""


class Untracked(Exception):
    """A schema whose members are not tracked; the message says why."""


def has_order(value: Any) -> bool:
    """Whether a value is or holds an object of several properties."""
    if isinstance(value, dict):
        return len(value) > 1 or any(map(has_order, value.values()))
    return isinstance(value, list) and any(map(has_order, value))


def uncounted(schema: Any) -> Any:
    """A looser schema, in which nothing is counted."""
    if not isinstance(schema, dict):
        return schema
    kept = {keyword: value for keyword, value in schema.items() if keyword not in COUNTED}
    if HITS in schema:
        kept["items"] = {"anyOf": [schema[HITS], schema.get("items", True)]}
    for keyword in ("minContains", "maxContains"):
        kept.pop(keyword, None)
    return rebuild(kept, lambda _, child: uncounted(child))


def said(schema: dict[str, Any]) -> frozenset[str]:
    """The keywords of a schema that bind its values."""
    return frozenset(schema) - AROUND


def reachable(document: dict[str, Any]) -> tuple[dict[int, dict[str, Any]], dict[int, list[int]]]:
    """Two tables by the identity of a schema: the schema itself, and the identities of the schemas that
    contain it or refer to it directly. Definitions that nothing refers to are left out."""
    found: dict[int, dict[str, Any]] = {}
    before: dict[int, list[int]] = {}
    unseen = [document]
    while unseen:
        node = unseen.pop()
        if id(node) in found:
            continue
        found[id(node)] = node
        for child in _within(document, node):
            if isinstance(child, dict):
                before.setdefault(id(child), []).append(id(node))
                unseen.append(child)
    return found, before


def _within(document: Schema, node: dict[str, Any]) -> list[Any]:
    """The schemas that a schema contains or refers to."""
    found = [child for step, child in children(node) if step[0] not in ("$defs", "definitions")]
    return found + ([target(document, node["$ref"])] if "$ref" in node else [])


def leading_to(goals: set[int], before: dict[int, list[int]]) -> set[int]:
    """The schemas from which one of `goals` can be reached, including the goals."""
    found, unseen = set(goals), list(goals)
    while unseen:
        for one in before.get(unseen.pop(), ()):
            if one not in found:
                found.add(one)
                unseen.append(one)
    return found
