"""Writes the items of a set as rules in which each value has only one spelling, or a few.

So two items are equal if their texts are. There are no blanks within an item, its properties come in the
order of the schema, and numbers have no exponent. An object has at most one property that is not listed: of
two, the order would be free.

In any order, an item that is an object of few listed properties has a spelling for each of their orders, if
there are more items than an answer can hold.
"""

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from personae.grammar.schema.document import Schema
from personae.grammar.schema.patterns import endless
from personae.grammar.schema.walk import DISTINCT, SET, target
from personae.grammar.tracked.arrays import listed_values, repeated
from personae.grammar.tracked.name_terminals import NamesBut, literal
from personae.grammar.tracked.numerals import fractions, integers
from personae.grammar.tracked.support import AROUND, Leaf, Untracked

_NOTES = (AROUND - {SET}) | {"description", "default", "examples", "$comment"}
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_OF_TYPE = {
    "integer": _OF_NUMBERS,
    "number": _OF_NUMBERS,
    "string": frozenset({"minLength", "maxLength", "pattern", "format", "allOf"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", DISTINCT, SET}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
_BINDING = frozenset().union(*_OF_TYPE.values())
_DEPTH = 32
_NESTED = 4
MOST_FREE = 4
"""Properties of an item that come in any order: the item has a text for each of their orders."""


class Items:
    """The rules of one set's items, with names that begin with `name`, which is that of an item."""

    def __init__(self, document: Schema, leaf: Leaf, name: str, *, any_order: bool = False) -> None:
        self._any_order = any_order
        self._document = document
        self._leaf = leaf
        self._name = name
        self._names: dict[tuple[int, bool, bool], str] = {}
        self._unwritten: list[tuple[str, Any, bool, bool]] = []
        self._kept: list[Any] = []
        self._ranks = _name_ranks(document, {})

    def rules(self, schema: Any) -> list[str]:
        """Raises Untracked if values may have several spellings."""
        free = self._any_order and self._has_room(schema)
        first = self._rule(schema, closed=False, free=free)
        lines = [f"{self._name}: {first}"]
        while self._unwritten:
            name, one, closed, free = self._unwritten.pop()
            lines += self._written(name, one, closed=closed, free=free)
        return lines

    def _rule(self, schema: Any, *, closed: bool, free: bool = False) -> str:
        """The name of the rule for a schema. `closed`: objects have no properties that are not listed.
        `free`: the properties of an object may come in any order."""
        for _ in range(_DEPTH):
            if isinstance(schema, dict) and _said(schema) == {"$ref"}:
                schema = target(self._document, schema["$ref"])
        key = id(schema), closed, free
        if key not in self._names:
            self._names[key] = f"{self._name}_{len(self._names)}"
            self._unwritten.append((self._names[key], schema, closed, free))
            self._kept.append(schema)
        return self._names[key]

    def _written(self, name: str, schema: Any, *, closed: bool, free: bool) -> Iterator[str]:
        if schema is False:
            raise Untracked("nothing satisfies an item of a set")
        schema = {} if schema is True else schema
        keywords = _said(schema)
        if "enum" in schema or "const" in schema:
            values = listed_values(self._document, schema)
            if not values or "$ref" in schema:
                raise Untracked("the listed values of a set's items are not known")
            # One terminal for all strings: the library gives up where thousands of rules may begin.
            strings = [value for value in values if isinstance(value, str) and value.isprintable()]
            ways = [self._leaf({"enum": strings})] if strings else []
            ways += [literal(self._text(value)) for value in values if value not in strings]
            yield f"{name}: " + " | ".join(ways)
        elif keywords == {"anyOf"}:
            several = sum(map(self._has_objects, schema["anyOf"])) > 1
            closed = closed or several
            ways = [self._rule(one, closed=closed, free=free) for one in schema["anyOf"] if one is not False]
            yield f"{name}: " + " | ".join(ways)
        elif odd := keywords - _BINDING - {"type"}:
            raise Untracked(f"the items of a set have {sorted(odd)[0]}")
        else:
            kinds = schema.get("type", list(_TYPES))
            kinds = kinds if isinstance(kinds, list) else [kinds]
            if "integer" in kinds and "number" in kinds:
                kinds = [kind for kind in kinds if kind != "integer"]
            yield f"{name}: " + " | ".join(f"{name}_{kind}" for kind in kinds)
            for kind in kinds:
                yield from self._of_type(f"{name}_{kind}", kind, schema, closed=closed, free=free)

    def _has_objects(self, schema: Any) -> bool:
        for _ in range(_DEPTH):
            if isinstance(schema, dict) and "$ref" in schema:
                schema = target(self._document, schema["$ref"])
        if not isinstance(schema, dict):
            return schema is not False
        if "anyOf" in schema:
            return any(map(self._has_objects, schema["anyOf"]))
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None:
            return any(isinstance(value, dict) for value in values)
        kinds = schema.get("type", "object")
        return "object" in (kinds if isinstance(kinds, list) else [kinds])

    def _of_type(
        self, name: str, kind: str, schema: dict[str, Any], *, closed: bool, free: bool
    ) -> Iterator[str]:
        match kind:
            case "null":
                yield f'{name}: "null"'
            case "boolean":
                yield f'{name}: "true" | "false"'
            case "string":
                kept = {key: value for key, value in schema.items() if key in _OF_TYPE["string"]}
                yield f"{name}: {self._leaf({'type': 'string', **kept})}"
            case "integer" | "number":
                yield f"{name}: /{_number(kind, schema)}/"
            case "array":
                yield from self._array(name, schema)
            case _:
                yield from self._object(name, schema, closed=closed, free=free)

    def _array(self, name: str, schema: dict[str, Any]) -> Iterator[str]:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        if (DISTINCT in schema or SET in schema) and not self._has_room(rest):
            raise Untracked("the items of a set are sets of few values")
        if isinstance(rest, list):
            raise Untracked("items are listed as in older drafts")
        most = len(first) if rest is False and (most is None or most > len(first)) else most
        if most is not None and least > most:
            raise Untracked("no array has as few and as many items as required")
        if most == 0:
            yield f'{name}: "[" "]"'
            return
        yield f'{name}: "[" {name}_0 "]"'
        for place, one in enumerate(first[:most]):
            comma = '"," ' if place else ""
            after = f"{comma}{self._rule(one, closed=False)} {name}_{place + 1}"
            yield f"{name}_{place}: {after}" + (" |" if place >= least else "")
        place = len(first[:most])
        if most == place:
            yield f"{name}_{place}:"
            return
        item = self._rule(rest, closed=False)
        again, low, high = f'("," {item})', max(least - place, 0), None if most is None else most - place
        if place:
            yield f"{name}_{place}: {repeated(again, low, high)}"
            return
        more = repeated(again, max(low - 1, 0), None if high is None else high - 1)
        yield f"{name}_0: {item} {more}" + ("" if low else " |")

    def _has_room(self, schema: Any, depth: int = 0) -> bool:
        """Whether there are more values than an answer can hold, so that a set of them is never all there is.
        False also if that is not evident."""
        for _ in range(_DEPTH):
            if isinstance(schema, dict) and _said(schema) == {"$ref"}:
                schema = target(self._document, schema["$ref"])
        if not isinstance(schema, dict):
            return False
        match schema.get("type"):
            case "string":
                said = _said(schema) - {"type", "minLength", "pattern"}
                return not said and ("pattern" not in schema or endless(schema["pattern"]))
            case "number" | "integer":
                return not _said(schema) - {"type", "minimum"}
            case "object" if depth < _NESTED:
                return any(self._has_room(one, depth + 1) for one in schema.get("properties", {}).values())
        ways = schema.get("anyOf", ()) if _said(schema) == {"anyOf"} and depth < _NESTED else ()
        return any(self._has_room(one, depth + 1) for one in ways)

    def _object(self, name: str, schema: dict[str, Any], *, closed: bool, free: bool) -> Iterator[str]:
        listed, required = schema.get("properties", {}), set(schema.get("required", ()))
        others = schema.get("additionalProperties", True)
        if not listed and not required and others is not False and "type" in schema:
            raise Untracked("the items of a set are objects whose properties are not listed")
        if closed and not listed and others is not False:
            raise Untracked("the items of a set are objects of several kinds")
        names = sorted({*listed, *required}, key=self._rank)
        members = [(one, listed.get(one, others)) for one in names if listed.get(one, others) is not False]
        if required - {one for one, _ in members}:
            raise Untracked("a required property is not allowed")
        is_open = not closed and others is not False
        if is_open:
            yield f"{name}_k".upper() + f": {NamesBut(tuple(names)).terminal()}"
            yield f'{name}_o: {name.upper()}_K ":" {self._rule(others, closed=False)}'
        if free and 1 < len(members) + is_open <= MOST_FREE:
            listed_ways = [self._member(key, value) for key, value in members]
            needed = sum(1 << place for place, (key, _) in enumerate(members) if key in required)
            yield from _in_any_order(name, [*listed_ways, *([f"{name}_o"] if is_open else [])], needed)
            return
        yield f'{name}: "{{" {name}_f0 "}}"'
        for place, (key, value) in enumerate(members):
            written = f"{self._member(key, value)} {name}_n{place + 1}"
            skipped = key not in required
            yield f"{name}_f{place}: {written}" + (f" | {name}_f{place + 1}" if skipped else "")
            if place:
                yield f'{name}_n{place}: "," {written}' + (f" | {name}_n{place + 1}" if skipped else "")
        end = len(members)
        yield f"{name}_f{end}: {name}_o |" if is_open else f"{name}_f{end}:"
        if end:
            yield f'{name}_n{end}: "," {name}_o |' if is_open else f"{name}_n{end}:"

    def _member(self, key: str, value: Any) -> str:
        return f"{literal(_dumped(key) + ':')} {self._rule(value, closed=False)}"

    def _rank(self, name: str) -> tuple[int, str]:
        return self._ranks.get(name, len(self._ranks)), name

    def _text(self, value: Any) -> str:
        """The only spelling of a value."""
        match value:
            case float() if value.is_integer():
                return str(int(value))
            case float() if float(plain := f"{value:.6f}".rstrip("0")) == value:
                return plain
            case dict():
                names = sorted(value, key=self._rank)
                return "{" + ",".join(f"{_dumped(name)}:{self._text(value[name])}" for name in names) + "}"
            case list():
                return "[" + ",".join(map(self._text, value)) + "]"
        return _dumped(value)


def _in_any_order(name: str, members: list[str], needed: int) -> Iterator[str]:
    """The rules of an object of some of `members`. `needed` has a bit for each that must be there."""
    every = (1 << len(members)) - 1
    for left in range(every + 1):
        end = [] if left & needed else ['"}"']
        ways = [
            f"{member} {name}_n{left & ~(1 << place)}"
            for place, member in enumerate(members)
            if left >> place & 1
        ]
        if left == every:
            yield f'{name}: "{{" {name}_f'
            yield f"{name}_f: " + " | ".join([*ways, *end])
            continue
        if ways:
            yield f"{name}_w{left}: " + " | ".join(ways)
        yield f"{name}_n{left}: " + " | ".join([*([f'"," {name}_w{left}'] if ways else []), *end])


def _said(schema: dict[str, Any]) -> frozenset[str]:
    return frozenset(schema) - _NOTES


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _number(kind: str, schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    bounds = [one for one in (low, high, above, below) if one is not None]
    if any(isinstance(one, bool) or not float(one).is_integer() for one in bounds):
        raise Untracked("the bounds of a set's numbers are not whole")
    least = _tighter(max, low, None if above is None else above + 1)
    most = _tighter(min, high, None if below is None else below - 1)
    parts = [integers(least, most)]
    if kind == "number":
        parts.append(fractions(_tighter(max, low, above), _tighter(min, high, below)))
    found = [part for part in parts if part is not None]
    if not found:
        raise Untracked("no number is within the bounds")
    return "|".join(found)


def _tighter(choose: Any, *bounds: float | None) -> int | None:
    known = [math.floor(one) for one in bounds if one is not None]
    return choose(known) if known else None


def _name_ranks(schema: Any, ranks: dict[str, int]) -> dict[str, int]:
    """The names of all properties in the order in which the document first mentions them."""
    unseen: Sequence[Any] = [schema]
    while unseen:
        one, *unseen = unseen
        if isinstance(one, dict):
            listed = one.get("properties")
            for name in listed if isinstance(listed, dict) else ():
                ranks.setdefault(name, len(ranks))
            unseen = [*one.values(), *unseen]
        elif isinstance(one, list):
            unseen = [*one, *unseen]
    return ranks
