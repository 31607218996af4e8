"""Rewrites a oneOf whose branches exclude one another as anyOf, which every grammar supports.

Two branches are compared by what they say directly: types, listed values, and properties that one requires
and the other has with other values or not at all. If that does not settle it, the canonical form may.
"""

from itertools import combinations
from typing import Any

from personae.grammar.schema.document import Schema
from personae.grammar.schema.patterns import exclusive
from personae.grammar.schema.walk import rebuild, subschemas, target

_KINDS = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
_DEPTH = 8
_COMPARISONS = 10_000

# What a schema says directly: itself, what it refers to, and the branches of its allOf.
Parts = list[dict[str, Any]]


def without_disjoint_one_of(document: Schema) -> Schema:
    """An equal schema in which oneOf is anyOf wherever its branches are seen to be disjoint."""
    if isinstance(document, bool):
        return document
    nodes = [one for one, _ in subschemas(document)]
    if not any("oneOf" in one for one in nodes):
        return document
    if any("$id" in one or "id" in one for one in nodes[1:]):
        return document  # references are relative to them
    rewritten: Schema = Reader(document).rewritten(document)
    return rewritten


class Reader:
    """Reads what the schemas of a document say directly, and whether two of them exclude one another."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._left = _COMPARISONS

    def rewritten(self, schema: Any) -> Any:
        """The schema with anyOf in place of oneOf, wherever the branches are seen to be disjoint."""
        if not isinstance(schema, dict):
            return schema
        rebuilt = rebuild(schema, lambda _, child: self.rewritten(child))
        branches = schema.get("oneOf")
        if isinstance(branches, list) and self._are_disjoint(schema, branches):
            either = rebuilt.pop("oneOf")
            if "anyOf" in rebuilt:
                rebuilt["allOf"] = [*rebuilt.get("allOf", ()), {"anyOf": either}]
            else:
                rebuilt["anyOf"] = either
        return rebuilt

    def _are_disjoint(self, schema: dict[str, Any], branches: list[Any]) -> bool:
        around = self.parts({keyword: value for keyword, value in schema.items() if keyword != "oneOf"})
        if around is None:
            return True  # nothing is valid anyway
        read = [self.parts(branch) for branch in branches]
        known = [[*around, *parts] for parts in read if parts is not None]
        return all(self.exclude(one, other, 0) for one, other in combinations(known, 2))

    def parts(self, schema: Any) -> Parts | None:
        """What a schema says directly, in parts. None if nothing satisfies it."""
        parts: Parts = []
        unseen = [schema]
        while unseen:
            one = unseen.pop()
            if one is False:
                return None
            if isinstance(one, dict) and not any(one is part for part in parts):
                parts.append(one)
                unseen += one.get("allOf", ())
                if "$ref" in one:
                    unseen.append(target(self._document, one["$ref"]))
        return parts

    def exclude(self, one: Parts | None, other: Parts | None, depth: int = 0) -> bool:
        """Whether no value satisfies both. False also if that is not evident."""
        self._left -= 1
        if one is None or other is None:
            return True
        if depth > _DEPTH or self._left < 0:
            return False
        kinds = self.kinds(one, depth) & self.kinds(other, depth)
        if not kinds:
            return True
        values, others = listed_in(one), listed_in(other)
        if values is not None and others is not None and not values & others:
            return True
        if kinds == {"string"} and exclusive(one, other):
            return True
        if kinds == {"object"} and (self._lacks(one, other, depth) or self._lacks(other, one, depth)):
            return True
        return any(
            all(self.exclude(self.parts(branch), there, depth + 1) for branch in part[keyword])
            for here, there in ((one, other), (other, one))
            for part in here
            for keyword in ("anyOf", "oneOf")
            if keyword in part
        )

    def kinds(self, parts: Parts | None, depth: int = 0) -> frozenset[str]:
        """The types that values may have that satisfy all parts."""
        if parts is None:
            return frozenset()
        kinds = _KINDS
        for part in parts:
            if "type" in part:
                kinds &= _listed(part["type"])
            for keyword in ("anyOf", "oneOf"):
                if keyword in part and depth < _DEPTH:
                    branches = (self.kinds(self.parts(one), depth + 1) for one in part[keyword])
                    kinds &= frozenset().union(*branches)
        values = listed_in(parts)
        return kinds if values is None else kinds & {kind for kind, _ in values}

    def _lacks(self, one: Parts, other: Parts, depth: int) -> bool:
        """Whether an object must have a property by `one` for which no value satisfies both."""
        for name in {name for part in one for name in part.get("required", ())}:
            for part in other:
                listed = part.get("properties", {})
                closed = part.get("additionalProperties") is False and not part.get("patternProperties")
                if listed.get(name) is False or (closed and name not in listed):
                    return True
                for wanted in one:
                    here = wanted.get("properties", {})
                    if name in here and name in listed:
                        both = self.parts(here[name]), self.parts(listed[name])
                        if self.exclude(*both, depth + 1):
                            return True
        return False


def _listed(kind: Any) -> frozenset[str]:
    kinds = set(kind if isinstance(kind, list) else [kind])
    if "number" in kinds:
        kinds |= {"integer", "fraction"}
    return frozenset(kinds & _KINDS)


def listed_in(parts: Parts) -> frozenset[tuple[str, Any]] | None:
    """The listed values, each with its kind. None if other values are allowed."""
    found: frozenset[tuple[str, Any]] | None = None
    for part in parts:
        if "const" in part or "enum" in part:
            values = [part["const"]] if "const" in part else part["enum"]
            named = frozenset(map(named_value, values))
            found = named if found is None else found & named
    return found


def named_value(value: Any) -> tuple[str, Any]:
    """A key that is equal for values that JSON Schema considers equal."""
    match value:
        case None:
            return "null", None
        case bool():
            return "boolean", value
        case int():
            return "integer", value
        case float():
            return ("integer" if value.is_integer() else "fraction"), value
        case str():
            return "string", value
        case list():
            return "array", tuple(map(named_value, value))
        case _:
            return "object", frozenset((name, named_value(one)) for name, one in value.items())
