"""Finds the ways in which schemas may hold together.

In a way, every alternative is decided: of `anyOf`, `oneOf`, `if` and `not` it has the one schema, or what
violates the other. What a way says of a value is then in the keywords of its schemas alone.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from personae.grammar.budget.regexes import pattern_distances
from personae.grammar.json.judge import Judge
from personae.grammar.json.text import Value
from personae.grammar.schema.prepare import ANALYSIS_ERRORS
from personae.grammar.schema.shortest import Lengths
from personae.grammar.schema.walk import target

Way = list[dict[str, Any]]

MOST_WAYS = 24
_COMBINED_IN_A_STEP = 64  # pairs of schemas
_MOST_DEPTH = 14  # schemas that apply in turn
_MOST_BRANCHES = 4  # of oneOf, each of which excludes the others
_MOST_VIOLATIONS = 4  # of one branch
_UNLISTED = "zz"  # a name that schemas hardly list
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_LEAST_AND_MOST = tuple(
    (f"min{what}", f"max{what}", kind)
    for what, kind in (("Length", "string"), ("Items", "array"), ("Properties", "object"))
)


class Alternatives:
    """`spend` is called with numbers of steps, and may raise an exception to end the search."""

    def __init__(self, judge: Judge, spend: Callable[[int], None]) -> None:
        self._judge = judge
        self._spend = spend
        self._bounds = Lengths(judge.document)
        # By what, and the identity of a schema: the schema, which is kept, and what belongs to it.
        self._known: dict[tuple[str, int], tuple[Any, Any]] = {}

    def known(self, what: str, schema: Any, make: Callable[[], Any]) -> Any:
        """What belongs to a schema, made once: the judge knows schemas by their identity."""
        key = what, id(schema)
        if key not in self._known:
            self._known[key] = schema, make()
        return self._known[key][1]

    def opposite(self, schema: Any) -> dict[str, Any]:
        """The schema of what violates another."""
        found: dict[str, Any] = self.known("not", schema, lambda: {"not": schema})
        return found

    def ways(
        self, schemas: Iterable[Any], value: Value | None, depth: int = 0, most: int = MOST_WAYS
    ) -> list[Way]:
        """Ways in which all of `schemas` may hold for a value, or for a new one. Not all if there are
        many."""
        ways: list[Way] = [[]]
        for schema in schemas:
            self._spend(1)
            if schema is False:
                return []
            if not isinstance(schema, dict):
                continue
            if depth > _MOST_DEPTH:
                return [[]]
            found: list[Way] = [[]]
            for options in self._options(schema, value, depth, most):
                self._spend(sum(map(len, found)) * sum(map(len, options)) // _COMBINED_IN_A_STEP)
                both = (one + option for one in found for option in options)
                found = [one for one in both if not contradictory([schema, *one])][:most]
            both = ([*way, schema, *one] for way in ways for one in found)
            ways = [one for one in both if not contradictory(one)][:most]
        return ways

    def _options(
        self, schema: dict[str, Any], value: Value | None, depth: int, most: int
    ) -> Iterator[list[Way]]:
        """For each keyword that applies schemas to the same value: the ways in which it may hold."""

        def within(*schemas: Any) -> list[Way]:
            return self.ways(schemas, value, depth + 1, most)

        if "$ref" in schema:
            yield within(target(self._judge.document, schema["$ref"]))
        for one in schema.get("allOf", ()):
            yield within(one)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                branches = [one for one in schema[keyword] if self._may_hold(one, value)]
                ways = [way for one in branches for way in within(one)]
                ways.sort(key=lambda way: sum(map(self._shortest, way)))
                if keyword == "oneOf" and len(branches) <= _MOST_BRANCHES and depth < _MOST_DEPTH // 2:
                    ways += self._alone(branches, value, depth)
                yield ways[:most]
        if "if" in schema:
            verdict = None if value is None else self._judge.verdict(schema["if"], value)
            ways = []
            if verdict is not True:
                ways += within(self.opposite(schema["if"]), schema.get("else", True))
            if verdict is not False:
                ways += within(schema["if"], schema.get("then", True))
            yield ways
        if "not" in schema:
            yield [way for one in self.violations(schema["not"], depth) for way in within(one)] or [[]]
        if value is not None and value.kind == "object":
            names = {*value.members, *([value.name] if value.name is not None and value.named else [])}
            yield from (within(one) for one in dependents(schema, names))

    def _may_hold(self, schema: Any, value: Value | None) -> bool:
        return value is None or self._judge.verdict(schema, value) is not False

    def _alone(self, branches: list[Any], value: Value | None, depth: int) -> list[Way]:
        """Ways in which one of some branches holds, and no other."""
        found: list[Way] = []
        for branch in branches:
            alone: list[Way] = [[]]
            for other in branches:
                if other is not branch and isinstance(other, dict):
                    violations = self.violations(other, depth + 1)[:_MOST_VIOLATIONS]
                    ways = [way for one in violations for way in self.ways([one], value, depth + 2, 4)]
                    alone = [one + way for one in alone for way in ways][:8]
            found += [one + way for one in alone for way in self.ways([branch], value, depth + 1, 8)]
        return found

    def _shortest(self, schema: Any) -> float:
        def bound() -> float:
            try:
                return self._bounds.of(schema)
            except ANALYSIS_ERRORS:
                return 50.0

        found: float = self.known("shortest", schema, bound)
        return found

    def violations(self, schema: Any, depth: int) -> list[Any]:
        """Schemas of which one has to hold for what violates another one, the plainest first; at the end the
        one that always does: the list need not have all."""
        if not isinstance(schema, dict):
            return [True] if schema is False else []
        found: list[Any] = self.known(
            "violations", schema, lambda: [*self._violations(schema, depth + 1), True]
        )
        return found

    def _violations(self, schema: dict[str, Any], depth: int) -> Iterator[Any]:
        if depth > _MOST_DEPTH:
            return

        def of(one: Any) -> list[Any]:
            return self.violations(one, depth)[:2]

        if "$ref" in schema:
            yield from self.violations(target(self._judge.document, schema["$ref"]), depth)
        for name in required_of(schema):
            yield {"properties": {name: False}}
        for name, one in schema.get("properties", {}).items():
            yield from ({"required": [name], "properties": {name: other}} for other in of(one))
        if "type" in schema:
            types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            yield {"type": [kind for kind in _TYPES if kind not in types]}
        for one in schema.get("allOf", ()):
            yield from self.violations(one, depth)
        for pattern, one in schema.get("patternProperties", {}).items():
            name = pattern_distances(pattern).example
            yield from (
                {"type": "object", "required": [name], "properties": {name: other}} for other in of(one)
            )
        for keyword in ("additionalProperties", "unevaluatedProperties"):
            for other in of(schema.get(keyword, True)):
                yield {"type": "object", "required": [_UNLISTED], "properties": {_UNLISTED: other}}
        for keyword in ("items", "unevaluatedItems"):
            if not isinstance(schema.get(keyword, True), list):
                yield from ({"type": "array", "contains": other} for other in of(schema.get(keyword, True)))
        if "contains" in schema:
            yield from ({"type": "array", "items": other} for other in of(schema["contains"]))
        for least, most, kind in _LEAST_AND_MOST:
            if schema.get(least):
                yield {"type": kind, most: schema[least] - 1}
            if most in schema:
                yield {"type": kind, least: schema[most] + 1}
        for bound, beyond in (("minimum", "exclusiveMaximum"), ("maximum", "exclusiveMinimum")):
            if bound in schema:
                yield {"type": "number", beyond: schema[bound]}
        if "not" in schema:
            yield schema["not"]
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                yield {"allOf": [ways[0] for one in schema[keyword] if (ways := of(one))]}


def required_of(schema: dict[str, Any]) -> list[str]:
    """The names that a schema requires."""
    found = schema.get("required", [])
    return found if isinstance(found, list) else []


def dependents(schema: dict[str, Any], names: Iterable[str]) -> list[dict[str, Any]]:
    """The schemas that bind an object because it has these names."""
    names = set(names)
    return [
        one
        for keyword in ("dependentSchemas", "dependencies")
        for name, one in schema.get(keyword, {}).items()
        if name in names and isinstance(one, dict)
    ]


def types_of(way: Way) -> list[str]:
    """The types that values of a way may have."""
    types = list(_TYPES)
    for schema in way:
        if "type" in schema:
            kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            types = [one for one in types if one in kinds or (one == "number" and "integer" in kinds)]
    return types


def contradictory(way: Way) -> bool:
    """Whether no value is of a way, as far as that is evident."""
    types = types_of(way)
    if types != ["object"]:
        return not types
    required = {name for schema in way for name in required_of(schema)}
    return any(schema.get("properties", {}).get(name) is False for schema in way for name in required)
