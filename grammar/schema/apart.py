"""Rewrites `oneOf` with overlapping branches, so that the branches exclude one another.

Where no exact form is known, each branch gets a condition that only it can meet: the tag that distinguishes
it from another branch, or the absence of what the other requires. So some valid answers can no longer be
written, such as an object without its tag, or one that has another branch's property with a value that this
branch does not accept. No answer is invalid.
"""

from typing import Any

from personae.grammar.schema.disjoint import Parts, Reader, listed_in


class Inseparable(Exception):
    """No condition is known that separates two branches."""


class Condition:
    """What a branch must also satisfy, so that no other branch matches."""

    def __init__(self, reader: Reader, one: Parts) -> None:
        self._reader = reader
        self._one = one
        self._listed = _listed(one)
        self._required = _required(one)
        self._added: dict[str, None] = {}
        self._barred: dict[str, None] = {}
        self._kinds = self._all = reader.kinds(one)

    def exclude(self, other: Parts) -> None:
        """Add what no value that satisfies `other` satisfies. Raises Inseparable."""
        shared = self._reader.kinds(self._one) & self._reader.kinds(other)
        if "object" not in shared:
            raise Inseparable
        if len(shared) > 1:
            if not all(map(_is_of_objects, (*self._one, *other))):
                raise Inseparable
            self._kinds -= shared - {"object"}  # both accept all of these: neither branch may have them
        theirs, needed = _listed(other), _required(other)
        if self._barred.keys() & needed:
            return
        tags = [name for name in self._listed if self._is_tag(name, theirs) and name not in self._barred]
        if tags:
            self._added[tags[0]] = None
            return
        free = needed - self._required - self._added.keys()
        names = sorted(free, key=lambda name: (name in self._listed, name))
        if names:
            self._barred[names[0]] = None
            return
        # A property that the other cannot have as it is here: written, it keeps the other away.
        odd = [name for name in self._listed if name not in self._barred and self._is_odd(name, other)]
        if not odd:
            raise Inseparable
        self._added[odd[0]] = None

    def _is_odd(self, name: str, other: Parts) -> bool:
        """Whether no value of this property is one that the other allows."""
        here = [part for one in self._listed[name] for part in self._reader.parts(one) or ()]
        if not here:
            return False
        for part in other:
            listed, patterns = part.get("properties", {}), part.get("patternProperties", {})
            others = True if patterns else part.get("additionalProperties", True)
            if self._reader.exclude(here, self._reader.parts(listed.get(name, others))):
                return True
        return False

    def _is_tag(self, name: str, theirs: dict[str, list[Any]]) -> bool:
        """Whether both list the values of this property, and have none in common."""
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
        """The condition as a schema; empty if the branch needs none."""
        said: dict[str, Any] = {}
        if self._kinds != self._all:
            numbers = {"number"} if "fraction" in self._kinds else self._kinds & {"integer"}
            said["type"] = sorted((self._kinds - {"integer", "fraction"}) | numbers)
        if self._barred:
            said["properties"] = dict.fromkeys(self._barred, False)
        if self._added:
            said["required"] = list(self._added)
        return said


def with_condition(branch: Any, said: dict[str, Any]) -> Any:
    """What satisfies a branch and its condition, in one schema where that is easy."""
    if not said or branch is False:
        return branch
    if branch is True:
        return said
    if "$ref" in branch or ("type" in said and "type" in branch):
        return {"allOf": [branch, said]}
    found = branch | said
    if "properties" in said and "properties" in branch:
        found["properties"] = branch["properties"] | said["properties"]
    if "required" in said and "required" in branch:
        found["required"] = [*dict.fromkeys((*branch["required"], *said["required"]))]
    return found


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
