"""Rewrites conditions (`not`, `oneOf`, `if`) by De Morgan's laws into what must be true.

The complement of a schema is written as alternatives, one for each keyword that a value may violate. Some
violations can only be written in part: a property that is not listed next to others, a fraction where no
multiple is allowed. So the rewritten schema accepts nothing that the original does not, and sometimes less.
"""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import jsonschema_rs

from personae.grammar.schema.apart import Condition, Inseparable, with_condition
from personae.grammar.schema.disjoint import Parts, Reader
from personae.grammar.schema.document import Schema, dialect
from personae.grammar.schema.patterns import anything_but, language
from personae.grammar.schema.shared import refers_to_definitions
from personae.grammar.schema.walk import rebuild, subschemas, target

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_OF_VALUE = {type(None): "null", bool: "boolean", str: "string", list: "array", dict: "object"}
_FRACTION = {"type": "number", "not": {"multipleOf": 1}}
_MOST_BRANCHES = 24
_MOST_TAGGED = 40  # branches with tags, which take less
_MOST_NUMBERS = 16
_MOST_WORK = 4_000
_CONDITIONS = frozenset({"not", "if", "oneOf", "dependentSchemas", "dependencies"})
_NAMED_DYNAMICALLY = frozenset({"$dynamicRef", "$recursiveRef", "unevaluatedProperties", "unevaluatedItems"})
# The keyword for the values that violate another one, their type, and what to add to its number.
_OPPOSITES = {
    "minLength": ("maxLength", "string", -1),
    "maxLength": ("minLength", "string", 1),
    "minItems": ("maxItems", "array", -1),
    "maxItems": ("minItems", "array", 1),
    "minProperties": ("maxProperties", "object", -1),
    "maxProperties": ("minProperties", "object", 1),
    "minimum": ("exclusiveMaximum", "number", 0),
    "maximum": ("exclusiveMinimum", "number", 0),
    "exclusiveMinimum": ("maximum", "number", 0),
    "exclusiveMaximum": ("minimum", "number", 0),
}


class Inexpressible(ValueError):
    """The complements would be too large, or one of them cannot be written at all."""


def without_conditions(document: Schema, *, by_tags: bool = False) -> Schema | None:
    """A schema of draft 2020-12 without `not`, `if` and `oneOf` that accepts nothing that `document` does not
    accept. None if there is none of these, or if none is known. Raises Inexpressible.

    `by_tags`: the branches of `oneOf` are kept apart by what `apart.py` finds, as far as possible. That
    accepts less and takes less.
    """
    if isinstance(document, bool):
        return None
    nodes = [one for one, _ in subschemas(document)]
    said = {keyword for one in nodes for keyword in one}
    if not said & _CONDITIONS or said & _NAMED_DYNAMICALLY:
        return None
    if any("$id" in one or "id" in one for one in nodes[1:]) or not refers_to_definitions(document):
        return None  # references are relative to them, or lead to what is rewritten
    current = modern(document)
    found: dict[str, Any] = _Rewriter(current, by_tags=by_tags).affirmed(current)
    return found


def modern(document: Any) -> Any:
    """The schema in the keywords of draft 2020-12."""
    if not isinstance(document, dict):
        return document
    found: dict[str, Any] = _modern(document, dialect(document))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


def _modern(schema: Any, draft: int) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = rebuild(schema, lambda _, child: _modern(child, draft))
    found.pop("$schema", None)
    if draft == jsonschema_rs.Draft4:
        for bound in ("inimum", "aximum"):
            exclusive = found.pop(f"exclusiveM{bound}", False)
            if exclusive is True and f"m{bound}" in found:
                found[f"exclusiveM{bound}"] = found.pop(f"m{bound}")
    if draft < jsonschema_rs.Draft202012:
        more = found.pop("additionalItems", True)
        if isinstance(found.get("items"), list):
            found["prefixItems"] = found.pop("items")
            found["items"] = more
    dependencies = found.pop("dependencies", None)
    for name, one in dependencies.items() if isinstance(dependencies, dict) else ():
        home = "dependentRequired" if isinstance(one, list) else "dependentSchemas"
        found[home] = {**found.get(home, {}), name: one}
    return found


class _Rewriter:
    def __init__(self, document: dict[str, Any], *, by_tags: bool) -> None:
        self._document = document
        self._by_tags = by_tags
        self._reader = Reader(document)
        self._followed: list[str] = []
        self._left = _MOST_WORK

    def affirmed(self, schema: Any) -> Any:
        """What a value must satisfy so that it satisfies `schema`."""
        if not isinstance(schema, dict):
            return schema
        self._count()
        kept = {
            keyword: value
            for keyword, value in schema.items()
            if keyword not in ("not", "oneOf", "if", "then", "else")
        }
        exact = bool({"maxContains", "minContains"} & kept.keys())
        found = rebuild(
            kept, lambda step, one: one if exact and step[0] == "contains" else self.affirmed(one)
        )
        conditions = []
        if "not" in schema:
            conditions.append(_FRACTION if _is_fraction(schema) else self.denied(schema["not"]))
        if isinstance(schema.get("oneOf"), list):
            conditions.append(self._one_of(schema))
        if "if" in schema:
            then, otherwise = schema.get("then", True), schema.get("else", True)
            met = _all(self.affirmed(schema["if"]), self.affirmed(then))
            conditions.append(_any([met, _all(self.denied(schema["if"]), self.affirmed(otherwise))]))
        match conditions:
            case [{"anyOf": alternatives, **rest}] if not rest and "anyOf" not in found:
                found["anyOf"] = alternatives
                conditions = []
        if conditions:
            found["allOf"] = [*found.get("allOf", ()), *conditions]
        return found

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise Inexpressible

    def _one_of(self, schema: dict[str, Any]) -> Any:
        """Alternatives for the branches, each without the values of the others."""
        branches = schema["oneOf"]
        around = self._reader.parts({key: value for key, value in schema.items() if key != "oneOf"})
        read = [self._reader.parts(one) for one in branches]
        known = [None if around is None or parts is None else [*around, *parts] for parts in read]
        overlapping = [
            [j for j, other in enumerate(known) if j != i and not self._reader.exclude(one, other)]
            for i, one in enumerate(known)
        ]
        if len(branches) > (_MOST_TAGGED if self._by_tags else _MOST_BRANCHES) and any(overlapping):
            raise Inexpressible
        ways = []
        for place, branch in enumerate(branches):
            one = known[place]
            if one is not None:
                condition = Condition(self._reader, one)
                denied = [
                    self.denied(branches[other])
                    for other in overlapping[place]
                    if not (self._by_tags and _separates(condition, known[other]))
                ]
                ways.append(_all(with_condition(self.affirmed(branch), condition.schema()), *denied))
        return _any(ways)

    def denied(self, schema: Any) -> Any:
        """What a value must satisfy so that it does not satisfy `schema`."""
        if isinstance(schema, bool):
            return not schema
        self._count()
        return _any(list(self._violations(schema)))

    def _violations(self, schema: dict[str, Any]) -> Iterator[Any]:
        for keyword, value in schema.items():
            if keyword in _OPPOSITES:
                opposite, kind, more = _OPPOSITES[keyword]
                if value + more >= 0 or not more:
                    yield {"type": kind, opposite: value + more}
                continue
            match keyword:
                case "$ref":
                    yield self._referred(value)
                case "type":
                    yield from _other_types(value if isinstance(value, list) else [value])
                case "enum":
                    yield from _other_values(value)
                case "const":
                    yield from _other_values([value])
                case "pattern" | "format":
                    pattern = language({"not": {keyword: value}})
                    if pattern is None:
                        raise Inexpressible
                    yield {"type": "string", "pattern": pattern}
                case "multipleOf":
                    if schema.get("type") == "integer" or not float(value).is_integer():
                        raise Inexpressible
                    yield _FRACTION
                case "uniqueItems" if value:
                    raise Inexpressible
                case "anyOf":
                    yield _all(*map(self.denied, value))
                case "allOf":
                    yield from map(self.denied, value)
                case "oneOf":
                    yield _all(*map(self.denied, value))
                    if len(value) < _MOST_BRANCHES:
                        for one, other in combinations(value, 2):
                            if not self._reader.exclude(self._reader.parts(one), self._reader.parts(other)):
                                yield _all(self.affirmed(one), self.affirmed(other))
                case "not":
                    yield self.affirmed(value)
                case "if":
                    yield _all(self.affirmed(value), self.denied(schema.get("then", True)))
                    yield _all(self.denied(value), self.denied(schema.get("else", True)))
                case _:
                    yield from self._of_members(keyword, value, schema)

    def _of_members(self, keyword: str, value: Any, schema: dict[str, Any]) -> Iterator[Any]:
        """Objects and arrays that violate a keyword about their members."""
        match keyword:
            case "required":
                yield from ({"type": "object", "properties": {name: False}} for name in value)
            case "properties":
                for name, one in value.items():
                    yield _having(name, self.denied(one))
            case "additionalProperties":
                barred = {
                    "properties": dict.fromkeys(schema.get("properties", ()), False),
                    "patternProperties": dict.fromkeys(schema.get("patternProperties", ()), False),
                }
                yield _some(self.denied(value), {home: names for home, names in barred.items() if names})
            case "patternProperties":
                for pattern, one in value.items():
                    denied = self.denied(one)
                    if denied is not False:
                        only = {"patternProperties": {pattern: denied}, "additionalProperties": False}
                        yield {"type": "object", "minProperties": 1, **only}
            case "propertyNames":
                names = _all({"type": "string"}, self.denied(value))
                yield {"type": "object", "minProperties": 1, "propertyNames": names}
            case "dependentRequired":
                for name, others in value.items():
                    for other in others:
                        yield {"type": "object", "required": [name], "properties": {other: False}}
            case "dependentSchemas":
                for name, one in value.items():
                    yield _all({"type": "object", "required": [name]}, self.denied(one))
            case "prefixItems":
                for place, one in enumerate(value):
                    yield _at(place, self.denied(one))
            case "items":
                first = len(schema.get("prefixItems", ()))
                denied = self.denied(value)
                yield _at(first, denied) if first else {"type": "array", "contains": denied}
            case "contains" if schema.get("minContains", 1) > 0:
                yield {"type": "array", "items": self.denied(value)}
            case "maxContains" if "contains" in schema:
                yield {
                    "type": "array",
                    "contains": self.affirmed(schema["contains"]),
                    "minContains": value + 1,
                }

    def _referred(self, reference: Any) -> Any:
        """The complement of what a reference leads to. Nothing where it leads back to itself."""
        if reference in self._followed:
            return False
        self._followed.append(reference)
        try:
            return self.denied(target(self._document, reference))
        finally:
            self._followed.pop()


def _separates(condition: Condition, other: Parts | None) -> bool:
    """Whether the condition, perhaps with more added to it, keeps another branch away."""
    if other is None:
        return True
    try:
        condition.exclude(other)
    except Inseparable:
        return False
    return True


def _is_fraction(schema: dict[str, Any]) -> bool:
    barred = schema["not"]
    return schema.get("type") == "number" and barred in ({"multipleOf": 1}, {"type": "integer"})


def _other_types(kinds: list[str]) -> Iterator[Any]:
    left = [kind for kind in _TYPES if kind not in kinds and not (kind == "number" and "integer" in kinds)]
    if left:
        yield {"type": left}
    if "integer" in kinds and "number" not in kinds:
        yield _FRACTION


def _other_values(values: list[Any]) -> Iterator[Any]:
    by_kind: dict[str, list[Any]] = {}
    for value in values:
        by_kind.setdefault(_OF_VALUE.get(type(value), "number"), []).append(value)
    if left := [kind for kind in _TYPES if kind not in by_kind]:
        yield {"type": left}
    if "string" in by_kind:
        yield {"type": "string", "pattern": anything_but(by_kind["string"])}
    if len(booleans := set(by_kind.get("boolean", ()))) == 1:
        yield {"enum": [not booleans.pop()]}
    numbers = sorted(set(by_kind.get("number", ())))
    if 0 < len(numbers) <= _MOST_NUMBERS:
        for low, high in zip([None, *numbers], [*numbers, None], strict=True):
            between = {"exclusiveMinimum": low, "exclusiveMaximum": high}
            yield {"type": "number", **{name: one for name, one in between.items() if one is not None}}
    for kind, least in (("array", "minItems"), ("object", "minProperties")):
        if kind in by_kind:
            yield {"type": kind, least: max(map(len, by_kind[kind])) + 1}


def _having(name: str, value: Any) -> Any:
    """An object with a property."""
    return False if value is False else {"type": "object", "required": [name], "properties": {name: value}}


def _some(value: Any, said: dict[str, Any]) -> Any:
    """An object with properties, all of which violate what it says of them."""
    if value is False:
        return False
    others = {} if value is True else {"additionalProperties": value}
    return {"type": "object", "minProperties": 1, **said, **others}


def _at(place: int, value: Any) -> Any:
    """An array with an item at a place."""
    if value is False:
        return False
    return {"type": "array", "prefixItems": [*[True] * place, value], "minItems": place + 1}


def _all(*schemas: Any) -> Any:
    if False in [one for one in schemas if isinstance(one, bool)]:
        return False
    parts = [one for one in schemas if one is not True]
    if len(parts) < 2:
        return parts[0] if parts else True
    return {"allOf": parts}


def _any(schemas: list[Any]) -> Any:
    if any(one is True for one in schemas):
        return True
    parts = [one for one in schemas if one is not False]
    if len(parts) < 2:
        return parts[0] if parts else False
    return {"anyOf": parts}
