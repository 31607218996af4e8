"""Writes an object as rules, with one bit for each listed property that is already there.

In the schema's order, a property may be written if no later one is there, and all required earlier ones are.
In any order, each property may be written that is not there yet. No path leads to an object that cannot be
ended: what is required, and as many properties as there must be, still fit.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import jsonschema_rs

from personae.grammar.regex.parse import NotRegular
from personae.grammar.regex.plain import complement, some_text
from personae.grammar.schema.document import for_library
from personae.grammar.schema.patterns import anything_but
from personae.grammar.schema.walk import NAMES
from personae.grammar.tracked.name_terminals import NamesBut, name_literal
from personae.grammar.tracked.support import BITS, OBJECT, Untracked, said

Rule = Callable[[Any], str]
"""Gives the name of the rule for a schema."""

_MOST_PATTERNS = 24  # each is compared with each other one
_LIKELY = ("a", "0", "-", " ")  # names, or what may follow in one


@dataclass(frozen=True, slots=True)
class _Members:
    """What an object may have: `listed` by name in order, and `others` (the names, or their schema, and the
    schema of the value)."""

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
    shape = _shape(members, any_order=any_order)
    ways = []
    for place, (key, value) in enumerate(members.listed.items()):
        after = f"{name}_n::{shape.written(place)} %if {shape.listed(place)}"
        ways.append(f'{name_literal(key)} ws ":" ws {rule(value)} ws {after}')
    for place, (names, value) in enumerate(members.others):
        key_rule = f"{name}_k{place}"
        if isinstance(names, NamesBut):
            key_rule = key_rule.upper()
            yield f"{key_rule}: {names.terminal()}"
        else:
            yield f"{key_rule}: {rule(names)}"
        yield f'{name}_v{place}: {key_rule} ws ":" ws {rule(value)} ws'
        ways += [f"{name}_v{place} {name}_n::{bits} %if {condition}" for bits, condition in shape.others()]
    end = f'"}}" %if {shape.end()}'
    yield f'{name}: "{{" ws {name}_f::0x0'
    yield f"{name}_f::_: {name}_m::_ | {end}"
    yield f"{name}_m::_: " + "\n  | ".join(ways)
    # There is no comma where no property may follow.
    yield f'{name}_n::_: "," ws {name}_m::_ %if {shape.more()} | {end}'


def too_many(schema: dict[str, Any]) -> bool:
    """Whether an object that counts nothing has too many properties for one bit each."""
    counts = {"minProperties", "maxProperties"} & schema.keys()
    listed = {*schema.get("properties", ()), *schema.get("required", ())}
    return schema.get("type") == "object" and not counts and len(listed) >= BITS


def _shape(members: _Members, *, any_order: bool) -> "_Shape":
    if not any_order:
        return _InOrder(members)
    if members.once and members.most is None and len(members.listed) >= BITS:
        return _ByName(members)
    return _AnyOrder(members)


def _members(schema: dict[str, Any]) -> _Members:
    if odd := said(schema) - OBJECT:
        raise Untracked(f"{sorted(odd)[0]} cannot be combined with counting")
    properties = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    patterns = schema.get("patternProperties", {})
    required = list(dict.fromkeys(schema.get("required", ())))
    dependent = [(one, other) for one, many in schema.get("dependentRequired", {}).items() for other in many]
    names = dict.fromkeys((*properties, *required, *(name for pair in dependent for name in pair)))
    if len(patterns) > 1 and not _are_apart(patterns):
        raise Untracked("patterns may match the same name")
    matching = {pattern: _matching(pattern, names) for pattern in patterns}
    listed = {name: _of_name(name, schema, matching) for name in names}
    barred = [name for name, one in listed.items() if one is False]
    if any(name in required for name in barred) or any(other in barred for _, other in dependent):
        raise Untracked("a required property is not allowed")
    free: list[tuple[Any, Any]] = [
        (_names_of(pattern, matching[pattern]), one)
        for pattern, one in patterns.items()
        if one is not False and _has_names([pattern], [], matching[pattern])
    ]
    if others is not False and _has_names([], patterns, names):
        name: Any = NamesBut(tuple(names))
        if patterns:
            apart = [{"pattern": one} for one in _opposites(patterns)]
            listed_apart = [{"pattern": anything_but(names)}] if names else []
            name = {"type": "string", "allOf": [*apart, *listed_apart]}
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


def _are_apart(patterns: Collection[str]) -> bool:
    """Whether no name matches two of the patterns. False also if that is not known."""
    if len(patterns) > _MOST_PATTERNS:
        return False
    try:
        return not any(some_text(pair) for pair in combinations(patterns, 2))
    except NotRegular:
        return False


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Those of the names that match a pattern."""
    judge = jsonschema_rs.validator_for(for_library({"pattern": pattern}))
    return [name for name in names if judge.is_valid(name)]


def _of_name(name: str, schema: dict[str, Any], matching: dict[str, list[str]]) -> Any:
    """What the value of a listed property must satisfy, if that is said in one place. Raises Untracked."""
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    found = [properties[name]] if name in properties else []
    found += [one for pattern, one in patterns.items() if name in matching[pattern]]
    if not found:
        return schema.get("additionalProperties", True)
    said = [one for one in found if one is not True and one != {}]
    if any(one is False for one in said):
        return False
    if any(one != said[0] for one in said):
        raise Untracked("a listed property also matches a pattern")
    return said[0] if said else True


def _has_names(matched: list[str], unmatched: Iterable[str], listed: Collection[str]) -> bool:
    """Whether a name matches all of `matched`, none of `unmatched`, and is not among those listed. True also
    if that is not known."""
    barred = [{"pattern": one} for one in unmatched]
    if not barred and not (matched and listed):
        return True
    wanted = [{"pattern": one} for one in matched]
    judge = jsonschema_rs.validator_for(for_library({"allOf": [*wanted, *({"not": one} for one in barred)]}))
    likely = (*_LIKELY, *(f"{name}{more}" for name in listed for more in _LIKELY))
    if any(name not in listed and judge.is_valid(name) for name in likely):
        return True  # which is found sooner than the automaton
    try:
        return some_text((*matched, anything_but(listed)), tuple(unmatched))
    except NotRegular:
        return True


def _names_of(pattern: str, listed: list[str]) -> dict[str, Any]:
    """The names that match a pattern and are not among those listed."""
    if not listed:
        return {"type": "string", "pattern": pattern}
    return {"type": "string", "allOf": [{"pattern": pattern}, {"pattern": anything_but(listed)}]}


def _opposites(patterns: Iterable[str]) -> Iterator[str]:
    """Patterns of the names that none of `patterns` match. Raises Untracked."""
    for pattern in patterns:
        opposite = complement(pattern)
        if opposite is None:
            raise Untracked("the names that no pattern matches are not known")
        yield opposite


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
        if self._recorded() + slots > BITS or len(self.names) + counted < least:
            raise Untracked("there are too many properties to count, or too few that can be distinguished")
        if self.most is not None and members.dependent:
            raise Untracked("a dependent property may not fit")
        self.least, self.slots = least, slots

    def _recorded(self) -> int:
        """How many listed properties have a bit."""
        return len(self.names)

    def end(self) -> str:
        """Where the object may end."""
        conditions = [f"bit_set({self.bit(self.places[name])})" for name in self.names if self._wanted(name)]
        if self.least:
            conditions.append(f"bit_count_ge(_, {self.least})")
        return _all(conditions + [self._kept(*pair) for pair in self.members.dependent])

    def bit(self, place: int) -> int:
        """The bit of a listed property."""
        return place

    def written(self, place: int) -> str:
        """How a listed property changes the bits."""
        return f"set_bit({self.bit(place)})"

    def more(self) -> str:
        """Where a property may be written at all."""
        ways = [self.listed(place) for place in range(len(self.names))]
        return _any([*ways, *(condition for _, condition in self.others() if self.members.others)])

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

    def more(self) -> str:
        first, count = self._first_optional, len(self.names)
        if self.most is None:
            return "true" if self.members.others else f"bit_count_lt([0:{count}], {count})"
        required = [f"bit_count_lt([0:{first}], {first})"] if first else []
        if self.members.others:  # as many have bits as may be there
            return _any([*required, *self._room()])
        optional = [_all([f"bit_count_lt([{first}:{count}], {count - first})", *self._room()])]
        return _any([*required, *(optional if count > first else [])])

    def _other(self) -> list[str]:
        return self._room()

    def _room(self) -> list[str]:
        if self.most is None:
            return []
        first = self._first_optional
        return [f"bit_count_lt([{first}:{BITS}], {self.most - first})"]


class _ByName(_Shape):
    """Any order, for more properties than there are bits. Those on which the end of the object depends have
    one; that no other is written twice, the matcher sees by their names."""

    def __init__(self, members: _Members) -> None:
        needed = {*members.required, *(name for pair in members.dependent for name in pair)}
        self._bits = {name: bit for bit, name in enumerate(name for name in members.listed if name in needed)}
        super().__init__(members)
        if self.least:
            raise Untracked("too many properties would have to be counted")

    def _recorded(self) -> int:
        return len(self._bits)

    def bit(self, place: int) -> int:
        return self._bits[self.names[place]]

    def written(self, place: int) -> str:
        return super().written(place) if self.names[place] in self._bits else "_"

    def listed(self, place: int) -> str:
        return f"bit_clear({self.bit(place)})" if self.names[place] in self._bits else "true"

    def others(self) -> Iterator[tuple[str, str]]:
        yield "_", "true"


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


def _any(conditions: list[str]) -> str:
    if "true" in conditions:
        return "true"
    found = ""
    for one in dict.fromkeys(conditions):
        found = f"or({found}, {one})" if found else one
    return found or "not(true)"


def _all(conditions: list[str]) -> str:
    found = "true"
    for one in conditions:
        if one != "true":
            found = one if found == "true" else f"and({found}, {one})"
    return found
