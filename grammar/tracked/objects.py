"""Writes an object as rules, with one bit for each listed property that is already there.

In the schema's order, a property may be written if no later one is there, and all required earlier ones are.
In any order, each property may be written that is not there yet. No path leads to an object that cannot be
ended: what is required, and as many properties as there must be, still fit.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema_rs

from personae.grammar.regex.plain import complement
from personae.grammar.schema.patterns import anything_but
from personae.grammar.schema.walk import NAMES
from personae.grammar.tracked.support import BITS, OBJECT, Untracked, said

Rule = Callable[[Any], str]
"""Gives the name of the rule for a schema."""

_BLANK_NAME = {"type": "string"}


@dataclass(frozen=True, slots=True)
class _Members:
    """What an object may have: `listed` by name in order, and `others` (schema of the name, schema of the
    value)."""

    listed: dict[str, Any]
    required: frozenset[str]
    others: tuple[tuple[Any, Any], ...]
    least: int
    most: int | None
    dependent: tuple[tuple[str, str], ...]
    once: bool
    """Whether no property is written twice, as the matcher sees to it."""


def object_rules(schema: dict[str, Any], rule: Rule, name: str, *, any_order: bool) -> Iterator[str]:
    """The rules of an object, the first of which is `name`. Raises Untracked."""
    members = _members(schema)
    if not members.listed and not members.others:
        yield f'{name}: "{{" ws "}}"'
        return
    shape = _AnyOrder(members) if any_order else _InOrder(members)
    ways = []
    for place, (key, value) in enumerate(members.listed.items()):
        written = json.dumps(json.dumps(key, ensure_ascii=False), ensure_ascii=False)
        yield f'{name}_w{place}: {written} ws ":" ws {rule(value)} ws'
        ways.append(f"{name}_w{place} {name}_n::set_bit({shape.bit(place)}) %if {shape.listed(place)}")
    for place, (key_schema, value) in enumerate(members.others):
        yield f'{name}_v{place}: {rule(key_schema)} ws ":" ws {rule(value)} ws'
        ways += [f"{name}_v{place} {name}_n::{bits} %if {condition}" for bits, condition in shape.others()]
    # The comma is part of each way, so that there is none where no way is left.
    end = f'"}}" %if {shape.end()}'
    yield f'{name}: "{{" ws {name}_f::0x0'
    yield f"{name}_f::_: " + "\n  | ".join([*ways, end])
    yield f"{name}_n::_: " + "\n  | ".join([*(f'"," ws {way}' for way in ways), end])


def _members(schema: dict[str, Any]) -> _Members:
    if odd := said(schema) - OBJECT:
        raise Untracked(f"{sorted(odd)[0]} cannot be combined with counting")
    properties = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    patterns = schema.get("patternProperties", {})
    required = list(dict.fromkeys(schema.get("required", ())))
    dependent = [(one, other) for one, many in schema.get("dependentRequired", {}).items() for other in many]
    names = dict.fromkeys((*properties, *required, *(name for pair in dependent for name in pair)))
    matched = jsonschema_rs.validator_for({"anyOf": [{"pattern": one} for one in patterns] or [False]})
    if any(matched.is_valid(name) for name in names):
        raise Untracked("a listed property also matches a pattern")
    if len(patterns) > 1:
        raise Untracked("patterns may match the same name")
    listed = {name: properties.get(name, others) for name in names}
    barred = [name for name, one in listed.items() if one is False]
    if any(name in required for name in barred) or any(other in barred for _, other in dependent):
        raise Untracked("a required property is not allowed")
    free: list[tuple[Any, Any]] = [
        ({"type": "string", "pattern": pattern}, one) for pattern, one in patterns.items() if one is not False
    ]
    if others is not False:
        name: Any = {"type": "string", "pattern": anything_but(names)} if names else _BLANK_NAME
        for pattern in patterns:
            opposite = complement(pattern)
            if opposite is None:
                raise Untracked("the names that no pattern matches are not known")
            name = {"type": "string", "allOf": [{"pattern": opposite}, *([name] if names else [])]}
        free.append((name, others))
    return _Members(
        {name: one for name, one in listed.items() if one is not False},
        frozenset(required),
        tuple(free),
        max(0, schema.get("minProperties", 0)),
        schema.get("maxProperties"),
        tuple(pair for pair in dict.fromkeys(dependent) if pair[0] not in barred and pair[1] not in required),
        NAMES in schema,
    )


class _Shape:
    """What both orders have in common: one bit for each listed property, then bits for other properties.

    Other properties that count have as many bits as there may or must be of them. Where an unlisted property
    may be written twice, it is then a single property, so all of them count once towards `minProperties`.
    """

    def __init__(self, members: _Members) -> None:
        self.members = members
        self.names = list(members.listed)
        self.places = {name: place for place, name in enumerate(self.names)}
        self.most = members.most
        required = len(members.required)
        least = members.least if members.least > required else 0
        if self.most is not None and self.most >= len(self.names) and not members.others:
            self.most = None
        if self.most is not None and self.most < max(required, least):
            raise Untracked("more properties are required than allowed")
        slots = 0
        if members.others:
            slots = self.most if self.most is not None else 1
            if members.once and self.most is None:
                slots = max(least, 1)
            elif self.most is not None and least > required and not members.once:
                raise Untracked(
                    "unlisted properties would count towards both minProperties and maxProperties"
                )
        counted = slots if members.once else bool(slots)
        if len(self.names) + slots > BITS or len(self.names) + counted < least:
            raise Untracked("there are too many properties to count, or too few that can be distinguished")
        if self.most is not None and members.dependent:
            raise Untracked("a dependent property may not fit")
        self.least, self.slots = least, slots

    def end(self) -> str:
        """Where the object may end."""
        conditions = [f"bit_set({self.bit(self.places[name])})" for name in self.names if self._wanted(name)]
        if self.least:
            conditions.append(f"bit_count_ge(_, {self.least})")
        return _all(conditions + [self._kept(*pair) for pair in self.members.dependent])

    def bit(self, place: int) -> int:
        """The bit of a listed property."""
        return place

    def _wanted(self, name: str) -> bool:
        return name in self.members.required

    def _kept(self, one: str, other: str) -> str:
        there = f"bit_set({self.bit(self.places[other])})"
        return f"or(bit_clear({self.bit(self.places[one])}), {there})" if one in self.places else "true"

    def others(self) -> Iterator[tuple[str, str]]:
        """How an unlisted property changes the bits, and where it may be."""
        first, conditions = len(self.names), self._other()
        if self.most is None and not self.members.once:
            yield f"set_bit({first})", _all(conditions)
            return
        for slot in range(self.slots):
            bit = first + slot
            free = [f"bit_clear({bit})", *([f"bit_set({bit - 1})"] if slot else [])]
            yield f"set_bit({bit})", _all([*conditions, *free])
        if self.most is None:
            last = first + self.slots - 1
            yield f"set_bit({last})", _all([*conditions, f"bit_set({last})"])

    def _other(self) -> list[str]:
        raise NotImplementedError

    def listed(self, place: int) -> str:
        """Where a listed property may be written."""
        raise NotImplementedError


class _AnyOrder(_Shape):
    """The bits of required properties come first, so that the other properties can be counted."""

    def __init__(self, members: _Members) -> None:
        super().__init__(members)
        order = sorted(self.names, key=lambda name: name not in members.required)
        self._bits = {name: bit for bit, name in enumerate(order)}
        self._first_optional = sum(name in members.required for name in self.names)

    def bit(self, place: int) -> int:
        return self._bits[self.names[place]]

    def listed(self, place: int) -> str:
        name = self.names[place]
        room = [] if name in self.members.required else self._room()
        return _all([f"bit_clear({self.bit(place)})", *room])

    def _other(self) -> list[str]:
        return self._room()

    def _room(self) -> list[str]:
        if self.most is None:
            return []
        first = self._first_optional
        return [f"bit_count_lt([{first}:{BITS}], {self.most - first})"]


class _InOrder(_Shape):
    """A property may be written while no later one is there."""

    def listed(self, place: int) -> str:
        name, count = self.names[place], len(self.names)
        conditions = [f"is_zeros([{place}:{min(count + self.slots, BITS)}])", *self._before(place)]
        if self.most is not None and name not in self.members.required:
            later = sum(self._wanted(one) for one in self.names[place:])
            conditions.append(f"bit_count_lt(_, {self.most - later})")
        if self.least and not (self.members.once and self.slots):
            least = self.least - (count - place) - bool(self.slots)
            conditions += [f"bit_count_ge(_, {least})"] if least > 0 else []
        for one, other in self.members.dependent:
            first, second = self.places.get(one, count), self.places[other]
            if second < place:
                if first == place:
                    conditions.append(f"bit_set({second})")
                elif first < place:
                    conditions.append(self._kept(one, other))
        return _all(conditions)

    def _before(self, place: int) -> list[str]:
        """The required earlier properties, which must be there when this one is written."""
        before = [index for index in range(place) if self._wanted(self.names[index])]
        return [f"bit_set({before[-1]})"] if before else []

    def _other(self) -> list[str]:
        count = len(self.names)
        conditions = self._before(count) + [self._kept(*pair) for pair in self.members.dependent]
        if self.most is not None:
            conditions.append(f"bit_count_lt(_, {self.most})")
        if self.least and not self.members.once:
            conditions.append(f"bit_count_ge(_, {self.least - 1})")
        return conditions


def _all(conditions: list[str]) -> str:
    found = "true"
    for one in conditions:
        if one != "true":
            found = one if found == "true" else f"and({found}, {one})"
    return found
