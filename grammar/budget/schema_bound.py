"""How far an answer can be from its end if a JSON Schema binds it, of which every keyword is enforced.

It finds the shortest value of each schema, the most that a begun object or array still needs, and the most
that a begun string, name or number needs. `distance_bound.py` says how these are used.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from personae.grammar.budget.distance_bound import DistanceBound, Measure
from personae.grammar.budget.hints import counted_values, examples_of, hints_of
from personae.grammar.budget.regexes import pattern_distances
from personae.grammar.schema.document import Schema
from personae.grammar.schema.walk import DISTINCT, FRACTION, HITS, NAMES, SET, children, target

_BEGUN = 8  # a begun character or escape, and a quote; a number without bounds
_LEXEME = 64  # any number, any string of a known format
_FAR = 10**9
_WRITER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
# These have no blanks, so plain text is never allowed in them.
_FIXED_FORMATS = frozenset(
    ("date", "time", "date-time", "duration", "uuid", "ipv4", "ipv6", "email", "hostname")
)
# How texts of formats end, from any place in them, however they begin.
_WAYS_OUT = {"email": ("a@b.co", "@b.co", "b.co"), "uri": ("a:", ":")}
_IN_PLACE = frozenset(("anyOf", "oneOf", "allOf", "$defs", "definitions"))
_NUMERIC = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", FRACTION))
# Keywords from which members and lexemes are found. Most schemas have neither.
_MEMBERS = frozenset(
    {"properties", "required", "minProperties", "patternProperties", "additionalProperties", "items"}
    | {"prefixItems", "additionalItems", "minItems", HITS}
)
_LEXEMES = _NUMERIC | {"format", "pattern", "patternProperties", "minLength", "allOf"}
_LEXEMES |= {"properties", "required", "const", "enum"}


def schema_bound(document: Schema, measure: Measure, *, any_order: bool = False) -> DistanceBound:
    """For JSON by `document`, of which every keyword is enforced, with its properties in any order or not."""
    return _SchemaBound(document, measure, any_order).bound()


@dataclass(slots=True)
class _SchemaBound:
    document: Schema
    measure: Measure
    any_order: bool
    _shortest: dict[int, float] = field(default_factory=dict)
    _rests: dict[int, float] = field(default_factory=dict)
    _names: dict[str, float] = field(default_factory=dict)

    def bound(self) -> DistanceBound:
        if isinstance(self.document, bool):
            return DistanceBound(8, 8, _BEGUN, number_ends=(), roots=1, texts=True, blanks=True, endless=True)
        nodes = list(self._nodes(self.document))
        self._settle(nodes)
        container = min(max(map(self._rest, self._nested(nodes)), default=0.0) + 8, _FAR)
        root = min(self._rest(self.document) + 8, _FAR)
        lexeme, plain, wide = 0, 0, False
        for node in nodes:
            lexeme, is_wide, narrow = self._lexeme(node, lexeme)
            wide = wide or is_wide or SET in node or NAMES in node
            plain |= narrow
        lexeme += _BEGUN
        grown: int | None = 1 + (lexeme if plain else 0)
        if any("patternProperties" in node or "propertyNames" in node for node in nodes):
            grown = 1 + lexeme + int(max(container, root))
        names = {name for node in nodes for name in node.get("patternProperties", ())}
        examples = {pattern_distances(name).example for name in names}
        examples.update(*map(examples_of, nodes))
        formats = {node["format"] for node in nodes if isinstance(node.get("format"), str)}
        examples.update(*(_WAYS_OUT[name] for name in formats & _WAYS_OUT.keys()))
        ends = tuple(json.dumps(text, ensure_ascii=False)[1:-1] for text in sorted(examples) if text)
        return DistanceBound(
            int(root),
            int(container),
            lexeme,
            None if wide else grown,
            hints=tuple(hints_of(nodes[0])),
            ends=ends,
            number_ends=(),
            roots=1,
            steps=_steps(nodes),
            values=counted_values(nodes, any_order=self.any_order),
            texts=all(map(self._leaves_text_alone, nodes)),
            blanks=True,
            endless=not any("maxLength" in node for node in nodes),
            proven=not any(len(_together(node)) > 1 or DISTINCT in node for node in nodes),
        )

    def _nested(self, nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The schemas of values within others: all except those that only the whole answer must satisfy."""
        seen: dict[int, dict[str, Any]] = {}
        unseen = [child for node in nodes for step, child in children(node) if step[0] not in _IN_PLACE]
        while unseen:
            node = unseen.pop()
            if isinstance(node, dict) and id(node) not in seen:
                seen[id(node)] = node
                unseen += [child for step, child in children(node) if step[0] in ("anyOf", "oneOf", "allOf")]
                if "$ref" in node:
                    unseen.append(target(self.document, node["$ref"]))
        return list(seen.values())

    def _leaves_text_alone(self, node: dict[str, Any]) -> bool:
        """Whether plain text in a string that allows it leaves the answer as near to its end as before."""
        if "patternProperties" in node or "propertyNames" in node:
            return False
        if {HITS, SET, DISTINCT, NAMES} & node.keys():  # text makes another string of an item that counts
            return False
        if "format" in node and node["format"] not in _FIXED_FORMATS:
            return False
        for keyword in ("anyOf", "oneOf"):
            kinds = [kind for one in node.get(keyword, ()) for kind in self._kinds(one)]
            # Text might change the answer from one alternative to another.
            if any(kinds.count(kind) > 1 for kind in ("any", "string", "object", "array")):
                return False
            if "any" in kinds and len(kinds) > 1:
                return False
        return "pattern" not in node or pattern_distances(str(node["pattern"])).fixed

    def _kinds(self, schema: Any) -> list[str]:
        """The types that a schema may have; "any" if they are not simply listed."""
        if isinstance(schema, dict) and {*schema} == {"$ref"}:
            schema = target(self.document, schema["$ref"])
        kinds = schema.get("type", "any") if isinstance(schema, dict) else "any"
        return [str(kind) for kind in kinds] if isinstance(kinds, list) else [str(kinds)]

    def _nodes(self, document: Schema) -> Iterator[dict[str, Any]]:
        """Every schema, including those that only a reference leads to."""
        seen: set[int] = set()
        unseen: list[Any] = [document]
        while unseen:
            node = unseen.pop()
            if isinstance(node, dict) and id(node) not in seen:
                seen.add(id(node))
                yield node
                within = [child for _, child in children(node)]
                if "$ref" in node:
                    within.append(target(self.document, node["$ref"]))
                within.reverse()
                unseen += within

    def _settle(self, nodes: list[dict[str, Any]]) -> None:
        """Find the values of all nodes. A value that was found infinite within a circle of references may be
        finite."""
        left = len(nodes) + 1
        while len(nodes) < left:
            left = len(nodes)
            for node in nodes:
                self._shortest.pop(id(node), None)
            nodes = [node for node in nodes if math.isinf(self._value(node))]

    def _value(self, schema: Any) -> float:
        """An upper bound of the shortest value's length; infinite while it is being computed."""
        if not isinstance(schema, dict):
            return 1.0
        if id(schema) not in self._shortest:
            self._shortest[id(schema)] = math.inf
            self._shortest[id(schema)] = self._value_of(schema)
        return self._shortest[id(schema)]

    def _value_of(self, schema: dict[str, Any]) -> float:
        total = 0.0
        if "$ref" in schema:
            total += self._value(target(self.document, schema["$ref"]))
        total += sum(self._value(one) for one in schema.get("allOf", ()))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                lengths = [self._value(one) for one in schema[keyword] if one is not False]
                finite = [length for length in lengths if length < math.inf] or [math.inf]
                # Other keywords may rule out the shortest alternative.
                total += min(finite) if {*schema} <= {keyword, "title", "description"} else max(finite)
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return total + self._longest(values)
        kinds = schema.get("type", [])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        lengths = [self._value_of_type(kind, schema) for kind in kinds]
        return total + (min(lengths) if lengths else 1.0)

    def _value_of_type(self, kind: str, schema: dict[str, Any]) -> float:
        if kind == "string":
            return 2.0 + _new_string(schema)
        if kind in ("object", "array"):
            return 2.0 + self._members(schema, pending=False)
        return 5.0 if kind in ("null", "boolean") else 1.0 + _number(schema)[0]

    def _members(self, schema: dict[str, Any], *, pending: bool) -> float:
        """What the members of an object or array need. With `pending`, also the longest begun member."""
        if _MEMBERS.isdisjoint(schema):
            return 7.0 if pending else 0.0
        listed = schema.get("properties", {})
        others = schema.get("additionalProperties", True)
        named = [
            self._written(name) + 4 + self._value(listed.get(name, others))
            for name in schema.get("required", ())
        ]
        count = max(schema.get("minProperties", 0) - len(named), 0)
        patterned = schema.get("patternProperties", {}).values()
        longest = 0.0
        if count:
            longest = max(map(self._value, (*listed.values(), *patterned, others)))
        more = count * (_LEXEME + longest)
        if pending:  # if begun and required, it is counted already
            required = frozenset(schema.get("required", ()))
            optional = [one for name, one in listed.items() if name not in required]
            longest = max(map(self._value, (*optional, *patterned, others)))
        items = schema.get("items", True)
        first = items if isinstance(items, list) else schema.get("prefixItems", [])
        rest = schema.get("additionalItems", True) if isinstance(items, list) else items
        least = schema.get("minItems", 0)
        elements = sum((self._value(one) + 2 for one in first[:least]), 0.0)
        if least > len(first):
            each = self._value(rest) + (2 + _BEGUN if SET in schema or DISTINCT in schema else 2)
            elements += (least - len(first)) * each
        if HITS in schema:
            elements += schema.get("minContains", 1) * (self._value(schema[HITS]) + 2)
        begun = max([longest, self._value(rest), *map(self._value, first)]) + 6 if pending else 0.0
        return float(sum(named) + more + elements + begun)

    def _rest(self, schema: Any) -> float:
        """The most that a container still needs that has turned out to be of this schema."""
        if not isinstance(schema, dict):
            return 8.0
        if id(schema) not in self._rests:
            self._rests[id(schema)] = 0.0
            total = self._members(schema, pending=True) + 2
            if "$ref" in schema:
                total += self._rest(target(self.document, schema["$ref"]))
            total += sum(self._rest(one) for one in schema.get("allOf", ()))
            for keyword in ("anyOf", "oneOf"):
                total += max((self._rest(one) for one in schema.get(keyword, ())), default=0.0)
            if "const" in schema or "enum" in schema:
                values = [schema["const"]] if "const" in schema else schema["enum"]
                total += self._longest(values)
            self._rests[id(schema)] = total
        return self._rests[id(schema)]

    def _lexeme(self, schema: dict[str, Any], least: int) -> tuple[int, bool, bool]:
        """What a begun string, name or number of this schema may need, at least `least`; whether plain text
        may matter to it (wide); and whether plain text may set back a pattern."""
        if _LEXEMES.isdisjoint(schema):
            return least, False, False
        length, wide, narrow = _LEXEME if "format" in schema else _number(schema)[1], False, False
        patterns = [str(pattern) for pattern in schema.get("patternProperties", ())]
        if isinstance(schema.get("pattern"), str):
            patterns.append(schema["pattern"])
        product = 1
        for pattern in patterns:
            bound = pattern_distances(pattern)
            length, wide, narrow = max(length, bound.bytes), wide or bound.wide, True
        together = _together(schema)
        for pattern in together:
            product *= max(pattern_distances(pattern).longest, 1) + 1
        if len(together) > 1:
            length = max(length, 4 * min(product, _FAR))
        fewest = schema.get("minLength", 0)
        if isinstance(fewest, int):
            length = (length + 1) * (fewest + 1) if patterns and fewest else length + 4 * fewest
        names = [*schema.get("properties", {}), *schema.get("required", ())]
        values = [schema["const"]] if "const" in schema else schema.get("enum", ())
        longest = self._longest([*names, *values], max(length, least))
        return int(longest), wide, narrow or "format" in schema

    def _longest(self, values: Iterable[Any], least: float = 0.0) -> float:
        """The most tokens that writing one of `values` takes, at least `least`. No text takes more tokens
        than it has bytes, so most need not be measured."""
        texts = sorted(map(_json, values), key=len, reverse=True)
        for text in texts:
            if len(text) <= least:
                break
            least = max(least, float(self.measure(text)))
        return least

    def _written(self, value: Any) -> float:
        if not isinstance(value, str):
            return float(self.measure(_json(value)))
        if value not in self._names:
            self._names[value] = float(self.measure(_json(value)))
        return self._names[value]


def _together(schema: dict[str, Any]) -> list[str]:
    """Patterns that a text must match all at once. Their automaton may exceed the library's limits anywhere
    in an answer, so a completion must be known from the beginning."""
    found = [one["pattern"] for one in schema.get("allOf", ()) if isinstance(one, dict) and "pattern" in one]
    return found + ([schema["pattern"]] if found and "pattern" in schema else [])


def _new_string(schema: dict[str, Any]) -> float:
    """What a new string needs, without its quotes: what the search writes, and a margin."""
    least = schema.get("minLength", 0)
    least = least if isinstance(least, int) else 0
    if "format" in schema:
        return float(_LEXEME + 4 * least)
    if "pattern" not in schema:
        return float(least)
    bound = pattern_distances(str(schema["pattern"]))
    if not bound.example or bound.wide or least:
        return float((bound.bytes + 1) * (least + 1))
    return min(2.0 * len(bound.example.encode()) + 4, max(float(bound.bytes), 4.0))


def _number(schema: dict[str, Any]) -> tuple[int, int]:
    """The most characters that a new number needs, and that a begun one needs."""
    if _NUMERIC.isdisjoint(schema):
        return 0, 0
    kinds = schema.get("type")
    low = [schema[name] for name in ("minimum", "exclusiveMinimum") if name in schema]
    high = [schema[name] for name in ("maximum", "exclusiveMaximum") if name in schema]
    whole = all(type(bound) is int for bound in (*low, *high))
    is_integer = (
        "integer" in kinds and "number" not in kinds if isinstance(kinds, list) else kinds == "integer"
    )
    if "multipleOf" in schema or not is_integer or not whole:
        return _LEXEME, _LEXEME
    # The neighbour of an excluded bound may be one digit longer.
    longest = max(len(str(bound)) for bound in (*low, *high)) + 1
    return (0 if max(low, default=0) <= 0 <= min(high, default=0) else longest), longest


def _steps(nodes: list[dict[str, Any]]) -> tuple[tuple[int, int], ...]:
    """What integers may have to be multiples of, each with the first multiple that the other bounds allow."""
    found: dict[tuple[int, int], None] = {}
    for node in nodes:
        step = node.get("multipleOf")
        if isinstance(step, int | float) and float(step).is_integer() and 1 < step < _FAR:
            least = max(node.get("minimum", 0), node.get("exclusiveMinimum", 0), 0)
            found[int(step), math.ceil(least / step) * int(step)] = None
            found[int(step), (math.floor(least / step) + 1) * int(step)] = None
    together = math.lcm(*(step for step, _ in found))
    if len(found) > 1 and together < _FAR:
        found[together, together] = None
    return tuple(found)


def _json(value: Any) -> bytes:
    return _WRITER.encode(value).encode("utf-8", "surrogatepass")
