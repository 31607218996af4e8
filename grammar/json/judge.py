"""Judges values that may not have ended by JSON Schemas.

A schema holds for a value (True), or does not, however the value goes on (False), or either may come (None).
`False` is certain of a begun value; `None` may be said where more is not known. What no grammar writes
(`$dynamicRef` and others that `resolved` leaves) is taken to hold.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any

import jsonschema_rs

from personae.grammar.json.text import Value
from personae.grammar.regex.ending import matches, may_match
from personae.grammar.schema.document import Schema, dialect, validator
from personae.grammar.schema.prepare import NAMES_OF_DRAFTS
from personae.grammar.schema.walk import target

Verdict = bool | None

_DEEPEST = 150  # schemas that apply in turn, by references or one within the other
_REMEMBERED = 1024
_LISTED_IN_ONE = 16  # values of an enum that cost as much as a schema
_LONG_NUMBER = 64  # digits from which a number is taken as a double
_LARGE = Fraction(10) ** 400  # a number beyond the doubles


def all_of(verdicts: Iterable[Verdict]) -> Verdict:
    """Whether all hold."""
    found: Verdict = True
    for verdict in verdicts:
        if verdict is False:
            return False
        if verdict is None:
            found = None
    return found


def any_of(verdicts: Iterable[Verdict]) -> Verdict:
    """Whether one holds."""
    found: Verdict = False
    for verdict in verdicts:
        if verdict is True:
            return True
        if verdict is None:
            found = None
    return found


def opposite(verdict: Verdict) -> Verdict:
    """Whether it does not hold."""
    return None if verdict is None else not verdict


class Judge:
    """Judges by the schemas of one document, which is well-formed. What it finds out is remembered by the
    identity of schemas, so they must not go away before the values do."""

    def __init__(self, document: Schema) -> None:
        self.document = document
        self.judged = 0
        """How many schemas have been looked at, for those who bound that; long lists count for several."""
        self._depth = 0
        self._draft = dialect(document) if isinstance(document, dict) else jsonschema_rs.Draft202012

    def verdict(self, schema: Any, value: Value) -> Verdict:
        """Whether a schema holds for a value."""
        if not isinstance(schema, dict):
            return schema is not False
        key = id(schema)
        if key not in value.known:
            if self._depth > _DEEPEST:
                return None
            self._depth += 1
            self.judged += 1 + len(schema.get("enum", ())) // _LISTED_IN_ONE
            value.known[key] = None  # a schema that applies itself says nothing
            try:
                value.known[key] = all_of(self._keywords(schema, value))
            finally:
                self._depth -= 1
        verdict: Verdict = value.known[key]
        return verdict

    def of_name(self, schema: dict[str, Any], name: str) -> list[Any]:
        """The schemas of a member's value that an object's own keywords have."""
        listed = schema.get("properties", {})
        found = [listed[name]] if name in listed else []
        found += [one for pattern, one in schema.get("patternProperties", {}).items() if _in(pattern, name)]
        if not found and "additionalProperties" in schema:
            found.append(schema["additionalProperties"])
        return found

    def first_items(self, schema: dict[str, Any]) -> list[Any]:
        """The schemas that an array's own keywords have for its first items."""
        return _items(schema)[0]

    def of_item(self, schema: dict[str, Any], place: int) -> Any:
        """The schema of an item that an array's own keywords have."""
        first, rest = _items(schema)
        return first[place] if place < len(first) else rest

    def _keywords(self, schema: dict[str, Any], value: Value) -> Iterator[Verdict]:
        if "$ref" in schema:
            yield self.verdict(target(self.document, schema["$ref"]), value)
        if "type" in schema:
            yield of_type(schema["type"], value)
        if "const" in schema:
            yield equals(schema["const"], value)
        if "enum" in schema:
            yield any_of(equals(one, value) for one in schema["enum"])
        for one in schema.get("allOf", ()):
            yield self.verdict(one, value)
        if "anyOf" in schema:
            yield any_of(self.verdict(one, value) for one in schema["anyOf"])
        if "oneOf" in schema:
            found = [self.verdict(one, value) for one in schema["oneOf"]]
            holding = found.count(True)
            yield False if holding > 1 else None if None in found else holding == 1
        if "not" in schema:
            yield opposite(self.verdict(schema["not"], value))
        if "if" in schema:
            yield self._condition(schema, value)
        match value.kind:
            case "object":
                yield from self._object(schema, value)
            case "array":
                yield from self._array(schema, value)
            case "string":
                yield from self._string(schema, value)
            case "number" if value.done:
                yield from _number(schema, number(value.text))
        if not value.done:
            yield None

    def _condition(self, schema: dict[str, Any], value: Value) -> Verdict:
        condition = self.verdict(schema["if"], value)
        then, other = (self.verdict(schema.get(keyword, True), value) for keyword in ("then", "else"))
        if condition is None:
            return then if then is other else None
        return then if condition else other

    def _object(self, schema: dict[str, Any], value: Value) -> Iterator[Verdict]:
        members, begun = value.members, value.begun_name
        for name, one in members.items():
            for of_name in self.of_name(schema, name):
                yield self.verdict(of_name, one)
        if begun is not None and value.named and False in self.of_name(schema, begun):
            yield False
        if begun is not None and not value.named and not _may_be_listed(schema, begun, members):
            yield False
        count = len(members) + (begun is not None)
        yield _counted(schema, "Properties", count, len(members), done=value.done)
        if "propertyNames" in schema:
            for name in members:
                yield self.verdict(schema["propertyNames"], Value("string", name, done=True))
            if begun is not None:
                name_verdict = self.verdict(schema["propertyNames"], Value("string", begun, done=value.named))
                yield None if name_verdict else name_verdict
        missing = sum(name not in members for name in _list(schema.get("required")))
        if missing:
            too_many = len(members) + missing > schema.get("maxProperties", math.inf)
            yield False if value.done or too_many else None
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, one in schema.get(keyword, {}).items():
                if name not in members:
                    continue
                if not isinstance(one, list):
                    yield self.verdict(one, value)
                elif not all(other in members for other in one):
                    yield False if value.done else None
        if "unevaluatedProperties" in schema and value.done:
            seen = self._evaluated(schema, value)
            for name, one in members.items():
                if name not in seen:
                    yield self.verdict(schema["unevaluatedProperties"], one)

    def _array(self, schema: dict[str, Any], value: Value) -> Iterator[Verdict]:
        items = value.items
        for place, one in enumerate(items):
            yield self.verdict(self.of_item(schema, place), one)
        yield _counted(schema, "Items", len(items), len(items), done=value.done)
        if schema.get("uniqueItems"):
            whole = [canonical(one) for one in items if one.done]
            yield len(set(whole)) == len(whole)
        if "contains" in schema:
            found = [self.verdict(schema["contains"], one) for one in items]
            if found.count(True) > schema.get("maxContains", math.inf):
                yield False
            if found.count(True) < schema.get("minContains", 1):
                yield False if value.done else None
        if "unevaluatedItems" in schema and value.done:
            seen = self._evaluated(schema, value)
            for place, one in enumerate(items):
                if place not in seen:
                    yield self.verdict(schema["unevaluatedItems"], one)

    def _string(self, schema: dict[str, Any], value: Value) -> Iterator[Verdict]:
        yield _counted(schema, "Length", len(value.text), len(value.text), done=value.done)
        if "pattern" in schema:
            pattern = schema["pattern"]
            if value.done:
                yield _in(pattern, value.text)
            elif not may_match(pattern, value.text):
                yield False
        if value.done and isinstance(schema.get("format"), str):
            yield _check(self._draft, "format", schema["format"])(value.text)

    def _evaluated(self, schema: Any, value: Value) -> set[str | int]:
        """The names or places in a whole value that a schema says something of."""
        if not isinstance(schema, dict):
            return set()
        found: set[str | int] = set()
        if value.kind == "object":
            found |= {name for name in value.members if self.of_name(schema, name)}
        else:
            first, _ = _items(schema)
            rest = "additionalItems" if isinstance(schema.get("items"), list) else "items"
            count = len(value.items)
            found |= set(range(count if rest in schema else min(len(first), count)))
            if "contains" in schema:
                hits = (self.verdict(schema["contains"], one) for one in value.items)
                found |= {place for place, hit in enumerate(hits) if hit}
        parts = [one for keyword in ("allOf", "anyOf", "oneOf") for one in schema.get(keyword, ())]
        if "$ref" in schema:
            parts.append(target(self.document, schema["$ref"]))
        if "if" in schema:
            then = "then" if self.verdict(schema["if"], value) else "else"
            parts += [schema["if"], schema.get(then, True)]
        for keyword in ("dependentSchemas", "dependencies"):
            parts += [one for name, one in schema.get(keyword, {}).items() if name in value.members]
        for part in parts:
            if isinstance(part, dict) and self.verdict(part, value):
                found |= self._evaluated(part, value)
                if "unevaluatedProperties" in part or "unevaluatedItems" in part:
                    found |= {*value.members, *range(len(value.items))}
        return found


def of_type(types: Any, value: Value) -> Verdict:
    """Whether a value is of one of some types."""
    types = types if isinstance(types, list) else [types]
    if value.kind in types:
        return True
    if value.kind != "number" or "integer" not in types:
        return False
    return number(value.text).denominator == 1 if value.done else None


def equals(wanted: Any, value: Value) -> Verdict:
    """Whether a value is the given one."""
    match wanted:
        case bool() | None:
            text = "null" if wanted is None else "true" if wanted else "false"
            kind = "null" if wanted is None else "boolean"
            return value.kind == kind and _equals_text(text, value)
        case str():
            return value.kind == "string" and _equals_text(wanted, value)
        case int() | float():
            if value.kind != "number":
                return False
            return exact(wanted) == number(value.text) if value.done else None
        case list():
            if value.kind != "array" or len(value.items) > len(wanted):
                return False
            parts = [equals(one, item) for one, item in zip(wanted, value.items, strict=False)]
        case _:
            begun = value.begun_name
            if value.kind != "object" or not value.members.keys() <= wanted.keys():
                return False
            if begun is not None and not any(name.startswith(begun) for name in wanted):
                return False
            parts = [equals(wanted[name], one) for name, one in value.members.items()]
    if value.done and len(parts) < len(wanted):
        return False
    return all_of([*parts, True if value.done else None])


def _equals_text(wanted: str, value: Value) -> Verdict:
    if value.done:
        return value.text == wanted
    return None if wanted.startswith(value.text) else False


def canonical(value: Value) -> Any:
    """What two whole values have in common if and only if they are equal."""
    if "" not in value.known:
        match value.kind:
            case "object":
                found: Any = frozenset((name, canonical(one)) for name, one in value.members.items())
            case "array":
                found = tuple(map(canonical, value.items))
            case "number":
                found = number(value.text)
            case _:
                found = value.text
        value.known[""] = value.kind, found
    return value.known[""]


def number(text: str) -> Fraction:
    """The number that JSON writes like this; a very long or large one about."""
    if len(text) < _LONG_NUMBER and "e" not in text and "E" not in text:
        return Fraction(text)
    found = float(text)
    return exact(found) if math.isfinite(found) else _LARGE if found > 0 else -_LARGE


def exact(found: float) -> Fraction:
    """The decimal that is written for a number of a schema."""
    return Fraction(found) if isinstance(found, int) else Fraction(repr(found))


def _number(schema: dict[str, Any], found: Fraction) -> Iterator[Verdict]:
    for keyword, sign in (("inimum", 1), ("aximum", -1)):
        bound, beyond = schema.get(f"m{keyword}"), schema.get(f"exclusiveM{keyword}")
        if bound is not None:
            yield sign * (found - exact(bound)) >= 0
        if beyond is True and bound is not None:  # draft 4
            yield found != exact(bound)
        elif beyond is not None and not isinstance(beyond, bool):
            yield sign * (found - exact(beyond)) > 0
    if step := schema.get("multipleOf"):
        yield (found / exact(step)).denominator == 1


def _counted(schema: dict[str, Any], what: str, count: int, whole: int, *, done: bool) -> Verdict:
    """Whether there are as many as a schema demands. `whole`: how many there are for certain."""
    if count > schema.get(f"max{what}", math.inf):
        return False
    return True if whole >= schema.get(f"min{what}", 0) else False if done else None


def _may_be_listed(schema: dict[str, Any], begun: str, members: Iterable[str]) -> bool:
    """Whether a begun name may become one that an object allows."""
    if schema.get("additionalProperties") is not False or schema.get("patternProperties"):
        return True
    listed = schema.get("properties", {}).items()
    return any(name.startswith(begun) and name not in members and one is not False for name, one in listed)


def _items(schema: dict[str, Any]) -> tuple[list[Any], Any]:
    """The schemas of an array's first items, and that of the others."""
    rest = schema.get("items", True)
    if isinstance(rest, list):  # as in older drafts
        return rest, schema.get("additionalItems", True)
    return schema.get("prefixItems", []), rest


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


@lru_cache(_REMEMBERED)
def _in(pattern: str, text: str) -> bool:
    """Whether a pattern is found in a text."""
    found = matches(pattern, text)
    return _check(jsonschema_rs.Draft202012, "pattern", pattern)(text) if found is None else found


@lru_cache(_REMEMBERED)
def _check(draft: int, keyword: str, wanted: str) -> Callable[[str], bool]:
    """Whether a text satisfies one keyword, as the validator sees it."""
    return validator({"$schema": NAMES_OF_DRAFTS[draft], keyword: wanted}).is_valid
