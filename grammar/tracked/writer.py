"""Writes a schema with tracked members as a Lark grammar for llguidance.

From the top down to the tracked objects and arrays, each schema is a rule. A schema with none of these inside
is left to the library unchanged. What cannot be written this way is refused if the schema counts something in
it, and keeps the schema's order if only the order was requested.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from personae.grammar.schema.document import Schema
from personae.grammar.schema.gate import counts_properties
from personae.grammar.schema.walk import DISTINCT, FRACTION, HITS, NAMES, rebuild, target
from personae.grammar.tracked.arrays import array_rules, repeated
from personae.grammar.tracked.items import Items
from personae.grammar.tracked.numerals import fractions
from personae.grammar.tracked.objects import object_rules
from personae.grammar.tracked.support import (
    AROUND,
    COUNTED,
    Leaf,
    Untracked,
    has_order,
    leading_to,
    reachable,
    said,
)

_ARRAY_ONLY = frozenset(
    {
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
        "additionalItems",
        "uniqueItems",
        "minContains",
        "maxContains",
        HITS,
        DISTINCT,
    }
)
_OBJECT_ONLY = frozenset(
    {"properties", "required", "additionalProperties", "patternProperties", "minProperties"}
    | {"maxProperties", "dependentRequired", NAMES}
)

_OF_FRACTIONS = frozenset({"type", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", FRACTION})
_OF_OTHERS = {"object": _ARRAY_ONLY, "array": _OBJECT_ONLY}
_REFERENCES = 32  # to references
_COMBINED = frozenset({"enum", "const", "$ref", "anyOf", "allOf", "oneOf"})


class TrackedRules(NamedTuple):
    """The result of writing a schema as rules.

    `text` is the grammar, whose first rule is `start`; None if the library needs no help. `keeps_order`:
    an object keeps the schema's order although any order is requested. `untracked` says why members that
    must be counted cannot be.
    """

    text: str | None
    keeps_order: bool = False
    untracked: str | None = None


def tracked_rules(
    document: Schema, leaf: Leaf, tight: Leaf, blanks: str | None, *, any_order: bool, only_free: bool = False
) -> TrackedRules:
    """Write a schema as rules. `blanks` is a regular expression for the blanks between two tokens, `tight` as
    `leaf`, without blanks. `only_free`: write no further, and no text, where an object keeps its order."""
    if isinstance(document, bool):
        return TrackedRules(None)
    writer = _Writer(document, leaf, tight, any_order=any_order)
    if not writer.needed:
        return TrackedRules(None)
    lines = [f"start: {writer.rule(document)}"]
    try:
        for rules in writer.written():
            if writer.keeps_order and only_free:
                return TrackedRules(None, keeps_order=True)
            lines.append(rules)
    except Untracked as reason:
        return TrackedRules(None, writer.keeps_order, str(reason))
    lines.append('ws: ""' if blanks is None else f"ws: WS?\nWS: /{blanks}/")
    return TrackedRules("\n".join(lines) + "\n", writer.keeps_order)


def is_counted(schema: dict[str, Any]) -> bool:
    """Whether a schema restricts members in a way that the library does not enforce."""
    found = COUNTED & schema.keys()
    if not found:
        return False
    if found & {"dependentRequired", HITS, FRACTION, DISTINCT}:
        return True
    if schema.get("uniqueItems") and schema.get("maxItems", 2) > 1:
        return True
    return bool({"minProperties", "maxProperties"} & found) and not counts_properties(schema)


class _Writer:
    def __init__(self, document: dict[str, Any], leaf: Leaf, tight: Leaf, *, any_order: bool) -> None:
        self._document = document
        self._leaf = leaf
        self._tight = tight
        self._any_order = any_order
        nodes, before = reachable(document)
        counted = {key for key, node in nodes.items() if is_counted(node)}
        ordered = {key for key, node in nodes.items() if any_order and _has_order(node)}
        self._hard = leading_to(counted, before)
        self._soft = leading_to(counted | ordered, before)
        self._names: dict[int | str, str] = {}
        self._unwritten: list[tuple[str, Any]] = []
        self._kept: list[Any] = []  # schemas made here, kept so that their identities are not reused
        self.keeps_order = False  # whether an object is written in the schema's order all the same

    @property
    def needed(self) -> bool:
        """Whether anything is tracked."""
        return id(self._document) in self._soft

    def rule(self, schema: Any) -> str:
        """The name of the rule for a schema."""
        tracked = id(schema) in self._soft
        if not tracked:
            schema = self._referred(schema)
        key: int | str = id(schema) if tracked else json.dumps(schema)
        if key not in self._names:
            self._names[key] = f"n{len(self._names)}"
            self._unwritten.append((self._names[key], schema))
            self._kept.append(schema)
        return self._names[key]

    def _referred(self, schema: Any) -> Any:
        """What a schema that is only a reference leads to, so that all references to it share a rule."""
        for _ in range(_REFERENCES):
            if not isinstance(schema, dict) or said(schema) != {"$ref"} or schema["$ref"][:1] != "#":
                break
            schema = target(self._document, schema["$ref"])
        return schema

    def written(self) -> Iterator[str]:
        """The rules that `rule` was asked for, and those that they need."""
        while self._unwritten:
            name, schema = self._unwritten.pop()
            if id(schema) not in self._soft:
                yield f"{name}: {self._leaf(self._alone(schema))}"
                continue
            try:
                yield "\n".join([*self._rules(name, schema)])
            except Untracked:
                if id(schema) in self._hard:
                    raise
                self.keeps_order = True
                yield f"{name}: {self._leaf(self._alone(schema))}"

    def _rules(self, name: str, schema: dict[str, Any]) -> Iterator[str]:
        kind = schema.get("type")
        if isinstance(kind, str) and kind in _OF_OTHERS:  # what binds other types says nothing
            schema = {keyword: value for keyword, value in schema.items() if keyword not in _OF_OTHERS[kind]}
        keywords = said(schema)
        if kind is None and keywords.isdisjoint(_COMBINED):
            kind = ["null", "boolean", "number", "string", "array", "object"]
        if keywords == {"$ref"}:
            yield f"{name}: {self.rule(target(self._document, schema['$ref']))}"
        elif keywords == {"anyOf"}:
            yield f"{name}: " + " | ".join(map(self.rule, schema["anyOf"]))
        elif kind == "object":
            yield from object_rules(schema, self.rule, name, any_order=self._any_order)
        elif DISTINCT in schema and kind == "array":
            yield from self._distinct(name, schema)
        elif kind == "array":
            yield from array_rules(self._document, schema, self.rule, name)
        elif FRACTION in schema:
            yield f"{name}: {_fraction(schema)}"
        elif isinstance(kind, list) and keywords.isdisjoint(_COMBINED):
            yield f"{name}: " + " | ".join([self.rule(self._of_type(one, schema)) for one in kind])
        else:
            raise Untracked("it is at a place where members are not tracked")

    def _distinct(self, name: str, schema: dict[str, Any]) -> Iterator[str]:
        """A set, except that the matcher sees to it that no item comes twice."""
        if odd := said(schema) - {"type", "items", "minItems", "maxItems", DISTINCT}:
            raise Untracked(f"{sorted(odd)[0]} cannot be combined with a set")
        least, most = max(0, schema.get("minItems", 0)), schema.get("maxItems")
        if most is not None and most < max(least, 1):
            raise Untracked("no set has as few and as many items as required")
        item = f"{name}_item"
        items = Items(self._document, self._tight, item, any_order=self._any_order)
        yield from items.rules(schema.get("items", True))
        again = f'("," ws {item} ws)'
        more = repeated(again, max(least - 1, 0), None if most is None else most - 1)
        yield f'{name}: "[" ws {item} ws {more} "]"' + ("" if least else ' | "[" ws "]"')

    def _of_type(self, kind: str, schema: dict[str, Any]) -> dict[str, Any]:
        """The part of a schema of several types that is about one of them."""
        others = _OF_OTHERS.get(kind, _ARRAY_ONLY | _OBJECT_ONLY)
        one = {keyword: value for keyword, value in schema.items() if keyword not in others | AROUND}
        if kind in ("object", "array"):
            one = {k: value for k, value in one.items() if k in _OBJECT_ONLY | _ARRAY_ONLY}
        one["type"] = kind
        for known in (self._soft, self._hard):
            if id(schema) in known and (kind in ("object", "array")):
                known.add(id(one))
        return one

    def _alone(self, schema: Any) -> Any:
        """A schema together with the definitions that it refers to."""
        definitions: dict[str, Any] = {}
        names: dict[str, str] = {}

        def moved(one: Any) -> Any:
            if not isinstance(one, dict):
                return one
            kept = {keyword: value for keyword, value in one.items() if keyword not in AROUND}
            rebuilt = rebuild(kept, lambda _, child: moved(child))
            if isinstance(pointer := rebuilt.get("$ref"), str):
                if not pointer.startswith("#"):
                    raise Untracked("a reference leads elsewhere")
                if pointer not in names:
                    names[pointer] = f"d{len(names)}"
                    definitions[names[pointer]] = moved(target(self._document, pointer))
                rebuilt["$ref"] = f"#/$defs/{names[pointer]}"
            return rebuilt

        alone = moved(schema)
        return alone | {"$defs": definitions} if definitions else alone


def _fraction(schema: dict[str, Any]) -> str:
    """A number that is not whole, without an exponent."""
    if odd := said(schema) - _OF_FRACTIONS:
        raise Untracked(f"{sorted(odd)[0]} cannot be combined with a number that is not whole")
    low = [int(schema[name]) for name in ("minimum", "exclusiveMinimum") if name in schema]
    high = [int(schema[name]) for name in ("maximum", "exclusiveMaximum") if name in schema]
    found = fractions(max(low, default=None), min(high, default=None))
    if found is None:
        raise Untracked("no number is within the bounds")
    return f"/{found}/"


def _has_order(schema: dict[str, Any]) -> bool:
    """Whether the properties of the schema's objects may come in several orders."""
    if "const" in schema or "enum" in schema:
        return any(map(has_order, [schema["const"]] if "const" in schema else schema["enum"]))
    kind = schema.get("type")
    if kind not in (None, "object") and not (isinstance(kind, list) and "object" in kind):
        return False
    listed = {*schema.get("properties", ()), *schema.get("required", ())}
    others = schema.get("additionalProperties", True) is not False or schema.get("patternProperties")
    return bool(listed) and (len(listed) > 1 or bool(others))
