"""Writes specs as text that llguidance reads."""

import json
import re
from decimal import ROUND_CEILING, ROUND_DOWN, ROUND_FLOOR, Context, Decimal
from functools import lru_cache
from math import gcd, inf
from threading import Lock
from typing import NamedTuple

from llguidance import regex_to_lark

from personae.errors import GrammarError
from personae.grammar.schema.document import PARAMS, Schema
from personae.grammar.schema.walk import rebuild
from personae.grammar.schema.whitespace import whitespace_pattern
from personae.grammar.spec import GrammarSpec
from personae.grammar.tracked.support import COUNTED
from personae.grammar.tracked.writer import TrackedRules, tracked_rules

_COUNTED = re.compile("|".join(f'"{keyword}"' for keyword in sorted(COUNTED)))
_REMEMBERED = 8
_CLASS = re.compile(r"\\.|\[(\^?)((?:[^\]\\]|\\.)*)\]", re.DOTALL)
_FROM_NUL = re.compile(r"\\(?:x00|u0000|0)-")
_DECIMALS = re.compile(r'"multipleOf": *[0-9]*\.[0-9]*[1-9]')
_LARGEST_STEP = 10_000  # in units of its last decimal
_BOUNDS = re.compile(r'"exclusiveM(?:in|ax)imum"|"m(?:in|ax)imum": *-?[0-9]+[.e]')
_UP, _DOWN = (Context(prec=15, rounding=one) for one in (ROUND_CEILING, ROUND_FLOOR))
_SMALLEST = Decimal("1e-40")  # the library nests a group for each zero, and cannot read many
_MAY_HOLD_NUL = re.compile(r"\[\^|\\(?:x00|u0000|0)-")


def lark_of(spec: GrammarSpec) -> str:
    """The spec as a Lark grammar."""
    match spec.kind:
        case "json_object" | "json_schema":
            return f"start: %json {schema_of(spec)}"
        case "regex":
            return f"start: {regex_lexeme(spec.source)}"
        case "choice":
            # A JSON string is also a Lark string, except for \u escapes of characters that are not ASCII.
            choices = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(spec.source))
            return "start: " + " | ".join(choices)
        case _:
            return spec.source


def regex_lexeme(pattern: str) -> str:
    """A regular expression between slashes, as in Lark. `\\d` matches ASCII digits only."""
    return f"/{regex_to_lark(pattern, use_ascii='d')}/"


def json_rule(schema: Schema, strict: bool, compact: bool, any_order: bool = False) -> str:
    """The body of a Lark rule for JSON that satisfies `schema`, as far as the library supports its
    keywords."""
    source = json.dumps(schema)
    rules = tracked_text(GrammarSpec("json_schema", source, strict, None, None, compact, any_order))
    return f"%json {json_with_options(source, strict, compact)}" if rules is None else f"%lark {{\n{rules}}}"


def tracked_text(spec: GrammarSpec) -> str | None:
    """The grammar of a schema with tracked members. None if the library needs no help with it.

    Raises GrammarError if the members cannot be tracked.
    """
    if not spec.any_order and not _COUNTED.search(spec.source):
        return None
    rules = _writing(_Request(spec.source, spec.strict, spec.compact, spec.any_order)).rules()
    if rules.untracked is not None:
        raise GrammarError(
            f"The members of an object or an array cannot be counted: {rules.untracked}.",
            param=PARAMS[spec.kind],
        )
    return rules.text


def keeps_order(schema: Schema, *, compact: bool = False) -> bool:
    """Whether an object of a strict schema keeps the schema's order although any order is requested."""
    return _writing(_Request(json.dumps(schema), True, compact, True)).keeps_order()


class _Request(NamedTuple):
    source: str
    strict: bool
    compact: bool
    any_order: bool


class _Writing:
    """Rules that are written once. Several threads ask for the same ones at once."""

    def __init__(self, request: _Request) -> None:
        self._request = request
        self._lock = Lock()
        self._rules: TrackedRules | None = None
        self._keeps_order: bool | None = None

    def rules(self) -> TrackedRules:
        with self._lock:
            if self._rules is None:
                self._rules = self._write()
            return self._rules

    def keeps_order(self) -> bool:
        with self._lock:
            if self._keeps_order is None:
                rules = self._rules or self._write(only_free=True)
                self._keeps_order = rules.keeps_order
                if not rules.keeps_order:
                    self._rules = rules
            return self._keeps_order

    def _write(self, *, only_free: bool = False) -> TrackedRules:
        source, strict, compact, any_order = self._request
        blanks = None if compact else whitespace_pattern(source)

        def leaf(schema: Schema) -> str:
            return f"%json {json_with_options(json.dumps(schema), strict, compact, blanks)}"

        return tracked_rules(
            json.loads(source), leaf, tight, blanks, any_order=any_order, only_free=only_free
        )


# It is known first whether any order is kept. Then the same rules are compiled over two vocabularies.
@lru_cache(_REMEMBERED)
def _writing(request: _Request) -> _Writing:
    return _Writing(request)


def tight(schema: Schema) -> str:
    """The right side of a rule for a part of an item of a set: strict, and without blanks."""
    return f"%json {json_with_options(json.dumps(schema), strict=True, compact=True)}"


def schema_of(spec: GrammarSpec) -> str:
    """The schema of a spec of JSON, in the form that the library reads."""
    if spec.kind == "json_object":
        return json_with_options('{"type": "object"}', strict=True, compact=spec.compact)
    return json_with_options(spec.source, spec.strict, spec.compact)


def json_with_options(source: str, strict: bool, compact: bool, blanks: str | None = None) -> str:
    """Adds the library's options as text: decoding and encoding a large schema would hold the interpreter.

    `blanks` are those of the whole structure that the schema is a part of.
    """
    flexible = {"whitespace_flexible": False}
    options = {
        **(flexible if compact else {"whitespace_pattern": blanks or whitespace_pattern(source)}),
        # Without \u: a second spelling of a listed property's name would avoid that property's schema.
        "json_allowed_escapes": 'nrbtf\\"',
        "lenient": not strict,
    }
    if _MAY_HOLD_NUL.search(source):
        source = json.dumps(_without_nul(json.loads(source)))
    if _DECIMALS.search(source):
        source = json.dumps(_with_fewer_decimals(json.loads(source)))
    if _BOUNDS.search(source):
        source = json.dumps(_with_exact_bounds(json.loads(source)))
    body = source.strip()
    if not body.startswith("{"):
        body = f'{{"allOf": [{body}]}}'
    separator = "" if body[1:-1].isspace() or body == "{}" else ","
    return f'{body[:-1]}{separator}"x-guidance": {json.dumps(options)}}}'


def _with_fewer_decimals(schema: Schema) -> Schema:
    """The schema with alternatives for multiples that have fewer decimals than the step.

    The library writes a multiple of 0.25 with two decimals or none, so it would not accept 2.5.
    """
    if not isinstance(schema, dict):
        return schema
    found = rebuild(schema, lambda _, child: _with_fewer_decimals(child))
    step = found.get("multipleOf")
    shorter = _shorter_steps(step) if isinstance(step, float) else []
    if shorter:
        steps = [{"multipleOf": one} for one in (found.pop("multipleOf"), *shorter)]
        found["allOf"] = [*found.get("allOf", ()), {"anyOf": steps}]
    return found


def _shorter_steps(step: float) -> list[float]:
    """The steps of the multiples of `step` that have one decimal, two, and so on, without `step` itself.

    Empty for powers of ten, where the library needs no help, and for steps of many digits, whose automata are
    large.
    """
    _, digits, exponent = Decimal(repr(step)).normalize().as_tuple()
    whole = int("".join(map(str, digits)))
    decimals = -int(exponent)
    if whole == 1 or whole > _LARGEST_STEP:
        return []
    lengths = ((length, whole // gcd(whole, 10 ** (decimals - length))) for length in range(1, decimals))
    return [float(Decimal(one).scaleb(-length)) for length, one in lengths]


def _with_exact_bounds(schema: Schema) -> Schema:
    """The schema with bounds that hold for the double that a reader gets of a number.

    The library compares decimals: 0.99999999999999999999 is less than 1, but is read as 1. So an exclusive
    bound becomes the next number of 15 digits, which is another double; rounding keeps the order. The library
    itself reads longer decimals as a neighbouring double, so inclusive bounds are cut to 15 digits, too. What
    it leaves out below a bound is added.
    """
    if not isinstance(schema, dict):
        return schema
    found = rebuild(schema, lambda _, child: _with_exact_bounds(child))
    if found.get("type") == "integer":
        return found
    for name, stricter, up in (("minimum", max, True), ("maximum", min, False)):
        exclusive = found.pop(f"exclusive{name.capitalize()}", None)
        bounds = [_within(found.pop(name), up=up)] if name in found else []
        if exclusive is not None:
            bounds.append(_beyond(exclusive, up=up))
        if bounds:
            found[name] = stricter(bounds)
    low, high = found.get("minimum", -inf), found.get("maximum", inf)
    begun = {*_beginnings(low), *_beginnings(high)}
    if values := sorted(one for one in begun if low <= one <= high):
        ranged = {name: found.pop(name) for name in ("minimum", "maximum") if name in found}
        found["allOf"] = [*found.get("allOf", ()), {"anyOf": [ranged, {"enum": values}]}]
    return found


def _beginnings(bound: float) -> list[float]:
    """The decimals that a bound begins with: 0.9 and 0.99 of 0.999. The library leaves them out where they
    are within the bound."""
    if not isinstance(bound, float) or bound in (inf, -inf):
        return []
    exact = Decimal(repr(bound))
    lengths = range(1, -int(exact.as_tuple().exponent))
    cut = {exact.quantize(Decimal(1).scaleb(-length), rounding=ROUND_DOWN) for length in lengths}
    return [float(one) for one in cut if one != one.to_integral_value()]


def _within(bound: float, *, up: bool) -> float:
    """The closest number of 15 digits from `bound` on upwards, or downwards. An integer is left as it is."""
    digits = _UP if up else _DOWN
    return float(digits.create_decimal(repr(bound))) if isinstance(bound, float) else bound


def _beyond(bound: float, *, up: bool) -> float:
    """The closest number of 15 digits above `bound`, or below it. Numbers closer to 0 than `_SMALLEST` are
    passed over."""
    exact = Decimal(repr(bound))
    found = _UP.next_plus(exact) if up else _DOWN.next_minus(exact)
    if abs(found) >= _SMALLEST:
        return int(found) if found == found.to_integral_value() else float(found)
    return 0 if found.is_signed() == up else float(_SMALLEST) * (1 if up else -1)


def _without_nul(schema: Schema) -> Schema:
    """The schema with patterns of which no class of characters has NUL, which is written only as \\u0000.

    For a class with NUL, the library accepts every escape, also of a quote or a backslash that the class
    does not have.
    """
    if not isinstance(schema, dict):
        return schema
    found = rebuild(schema, lambda _, child: _without_nul(child))
    if isinstance(found.get("pattern"), str):
        found["pattern"] = _CLASS.sub(_class_without_nul, found["pattern"])
    if isinstance(found.get("patternProperties"), dict):
        named = found["patternProperties"].items()
        found["patternProperties"] = {_CLASS.sub(_class_without_nul, name): one for name, one in named}
    return found


def _class_without_nul(found: re.Match[str]) -> str:
    negated, body = found.groups()
    if not body:
        return found[0]
    if negated:
        return rf"[^\x00{body}]"
    later = _FROM_NUL.sub(r"\\x01-", body)
    return f"[{later}]"
