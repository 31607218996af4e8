"""oneOf whose branches overlap, with branches that keep apart from one another.

Where no exact form is known, a branch gets what only it can have: the tag that tells it from another, or the
lack of what the other requires. So some valid answers cannot be written any more, such as an object without
its tag, or one that has a property of another branch with a value that the other does not take; no answer is
invalid.
"""

import json
from collections.abc import Iterator
from typing import Any

from personae.grammar.schema.disjoint import Parts, Reader, listed_in
from personae.grammar.schema.document import Schema
from personae.grammar.schema.walk import rebuild, subschemas, target

_MOST_BRANCHES = 40
# Where less being taken within them might mean more being taken by the whole.
_OPPOSING = frozenset(
    {"not", "if", "contains", "propertyNames", "unevaluatedProperties", "unevaluatedItems", "maxContains"}
)
_NOTES = frozenset({"title", "description", "default", "examples", "$comment"})


class _Together(Exception):
    """Nothing is known that keeps two branches apart."""


def kept_apart(document: Schema) -> Schema | None:
    """A schema that takes nothing that `document` does not, in which no oneOf is left; None if none is known,
    or needed."""
    if isinstance(document, bool):
        return None
    nodes = [one for one, _ in subschemas(document)]
    if not any("oneOf" in one for one in nodes) or any(_OPPOSING & one.keys() for one in nodes):
        return None
    if any("$id" in one or "id" in one for one in nodes[1:]):
        return None  # references are relative to them
    try:
        return _Keeper(document).whole()
    except _Together:
        return None


class _Keeper:
    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._reader = Reader(document)
        self._names: dict[str, str] = {}
        self._definitions: dict[str, Any] = {}

    def whole(self) -> dict[str, Any]:
        """The document rewritten. Raises _Together."""
        found: dict[str, Any] = self.rewritten(self._document)
        if self._definitions:
            found["$defs"] = found.get("$defs", {}) | self._definitions
        return found

    def rewritten(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        rebuilt = rebuild(schema, lambda _, child: self.rewritten(child))
        branches = rebuilt.pop("oneOf", None)
        if isinstance(branches, list):
            either = {"anyOf": list(self._apart(schema, schema["oneOf"], branches))}
            if "anyOf" in rebuilt:
                rebuilt["allOf"] = [*rebuilt.get("allOf", ()), either]
            else:
                rebuilt |= either
        return rebuilt

    def _apart(self, schema: dict[str, Any], before: list[Any], branches: list[Any]) -> Iterator[Any]:
        """`before` are the branches as they were: what is to be kept apart from."""
        if len(before) > _MOST_BRANCHES:
            raise _Together
        around = self._reader.parts({key: value for key, value in schema.items() if key != "oneOf"})
        read = [self._reader.parts(branch) for branch in before]
        known = [None if around is None or parts is None else [*around, *parts] for parts in read]
        for one, branch in zip(known, branches, strict=True):
            if one is None:
                continue
            others = [other for other in known if other is not one and not self._reader.exclude(one, other)]
            condition = _Condition(self._reader, one)
            for other in others:
                assert other is not None
                condition.exclude(other)
            yield self._with(branch, condition.schema())

    def _with(self, branch: Any, said: dict[str, Any]) -> Any:
        """A branch and what is said of it; what a reference leads to is a definition of its own then."""
        if not said:
            return branch
        if not isinstance(branch, dict):
            return said
        if branch.keys() - _NOTES != {"$ref"}:
            return _merged(branch, said)
        key = json.dumps([branch["$ref"], said])
        if key not in self._names:
            name = self._names[key] = f"apart-{len(self._names)}"
            referred = target(self._document, branch["$ref"])
            self._definitions[name] = _merged(self.rewritten(referred), said)
        return {"$ref": f"#/$defs/{self._names[key]}"}


class _Condition:
    """What a branch gets so that others are not matched."""

    def __init__(self, reader: Reader, one: Parts) -> None:
        self._reader = reader
        self._one = one
        self._listed = _listed(one)
        self._required = _required(one)
        self._added: dict[str, None] = {}
        self._barred: dict[str, None] = {}
        self._kinds = self._all = reader.kinds(one)

    def exclude(self, other: Parts) -> None:
        """Say what no value has that is as `other` says. Raises _Together."""
        shared = self._reader.kinds(self._one) & self._reader.kinds(other)
        if "object" not in shared:
            raise _Together
        if len(shared) > 1:
            if not all(map(_is_of_objects, (*self._one, *other))):
                raise _Together
            self._kinds -= shared - {"object"}  # both take all of these: they say nothing of them
        theirs, needed = _listed(other), _required(other)
        if self._barred.keys() & needed:
            return
        tags = [name for name in self._listed if self._is_tag(name, theirs) and name not in self._barred]
        if tags:
            self._added[tags[0]] = None
            return
        free = needed - self._required - self._added.keys()
        names = sorted(free, key=lambda name: (name in self._listed, name))
        if not names:
            raise _Together
        self._barred[names[0]] = None

    def _is_tag(self, name: str, theirs: dict[str, list[Any]]) -> bool:
        """Whether the values of a property are listed for both, and none is for both."""
        if name not in theirs:
            return False
        here, there = (
            [part for one in said for part in self._reader.parts(one) or ()]
            for said in (self._listed[name], theirs[name])
        )
        return (
            listed_in(here) is not None and listed_in(there) is not None and self._reader.exclude(here, there)
        )

    def schema(self) -> dict[str, Any]:
        """What the branch gets; nothing if it needs nothing."""
        said: dict[str, Any] = {}
        if self._kinds != self._all:
            numbers = {"number"} if "fraction" in self._kinds else self._kinds & {"integer"}
            said["type"] = sorted((self._kinds - {"integer", "fraction"}) | numbers)
        if self._barred:
            said["properties"] = dict.fromkeys(self._barred, False)
        if self._added:
            said["required"] = list(self._added)
        return said


def _merged(branch: Any, said: dict[str, Any]) -> dict[str, Any]:
    """Both in one where that is easy: what refers to itself may have nothing beside its reference."""
    if not isinstance(branch, dict) or "$ref" in branch or ("type" in said and "type" in branch):
        return {"allOf": [branch, said]}
    merged = branch | said
    if "properties" in said and "properties" in branch:
        merged["properties"] = branch["properties"] | said["properties"]
    if "required" in said and "required" in branch:
        merged["required"] = [*branch["required"], *said["required"]]
    return merged


def _is_of_objects(part: dict[str, Any]) -> bool:
    return _BINDING.isdisjoint(part)


_BINDING = frozenset(
    {"anyOf", "oneOf", "enum", "const", "items", "prefixItems", "minItems", "maxItems", "uniqueItems"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength"}
    | {"maxLength", "pattern", "format", "additionalItems", "dependentSchemas", "dependencies"}
)


def _listed(parts: Parts) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for part in parts:
        for name, one in part.get("properties", {}).items():
            found.setdefault(name, []).append(one)
    return found


def _required(parts: Parts) -> set[str]:
    return {name for part in parts for name in part.get("required", ())}
