"""Writes an array as rules. One bit records each value of a set that is already there; a counter counts what
`contains` counts."""

from collections.abc import Iterator
from typing import Any

import jsonschema_rs

from personae.grammar.schema.disjoint import named_value
from personae.grammar.schema.document import Schema, for_library
from personae.grammar.schema.walk import HITS, target
from personae.grammar.tracked.objects import Rule
from personae.grammar.tracked.support import ARRAY, BITS, Untracked, said

_MOST_STATES = 400  # of matches and items, if both have a maximum
_DEPTH = 8


def array_rules(document: Schema, schema: dict[str, Any], rule: Rule, name: str) -> Iterator[str]:
    """The rules of an array, the first of which is `name`. Raises Untracked."""
    if odd := said(schema) - ARRAY:
        raise Untracked(f"{sorted(odd)[0]} cannot be combined with counting")
    if isinstance(schema.get("items"), list):  # as in older drafts
        others = schema.get("additionalItems", True)
        schema = {**schema, "prefixItems": schema["items"], "items": others}
    least, most = max(0, schema.get("minItems", 0)), schema.get("maxItems")
    if schema.get("uniqueItems") and (most is None or most > 1):
        if HITS in schema or "prefixItems" in schema:
            raise Untracked("the items of a set have different schemas")
        yield from _set_rules(document, schema, rule, name, least, most)
    elif HITS in schema:
        yield from _containing_rules(schema, rule, name, least, most)
    else:
        yield from _plain_rules(schema, rule, name, least, most)


def _plain_rules(
    schema: dict[str, Any], rule: Rule, name: str, least: int, most: int | None
) -> Iterator[str]:
    """Items that are not counted by content: the first ones in turn, then any number of others."""
    first = schema.get("prefixItems", [])
    if schema.get("items", True) is False:
        most = len(first) if most is None else min(most, len(first))
    first = first[:most]
    if most is not None and least > most:
        raise Untracked("no array has as few and as many items as required")
    if most == 0:
        yield f'{name}: "[" ws "]"'
        return
    for place, one in enumerate(first):
        rest = f"{name}_{place + 1}"
        comma = '"," ws ' if place else ""
        yield f"{name}_{place}: {comma}{rule(one)} ws {rest}" + (" |" if place >= least else "")
    place = len(first)
    yield f'{name}: "[" ws {name}_0 "]"'
    if most is not None and most <= place:
        yield f"{name}_{place}: "
        return
    item = rule(schema.get("items", True))
    again = f'("," ws {item} ws)'
    low, high = max(least - place, 0), None if most is None else most - place
    if place:
        yield f"{name}_{place}: {repeated(again, low, high)}"
        return
    whole = f"{item} ws {repeated(again, max(low - 1, 0), None if high is None else high - 1)}"
    yield f"{name}_0: {whole}" + ("" if low else " |")


def repeated(one: str, least: int, most: int | None) -> str:
    """`one` so many times. The library refuses `{0,0}`, so nothing is written for it."""
    if most is None:
        return f"{one}{{{least},}}" if least else f"{one}*"
    return f"{one}{{{least},{most}}}" if most else ""


def _set_rules(
    document: Schema, schema: dict[str, Any], rule: Rule, name: str, least: int, most: int | None
) -> Iterator[str]:
    values = listed_values(document, schema.get("items", True))
    if values is None or len(values) > BITS:
        raise Untracked("the items of a set are not listed, or too many")
    if least > min(len(values), len(values) if most is None else most):
        raise Untracked("the set does not have that many different items")
    room = "" if most is None or most >= len(values) else f"bit_count_lt(_, {most})"
    end = f"bit_count_ge(_, {least})" if least > 1 else "true"
    ways = []
    for bit, value in enumerate(values):
        free = f"and(bit_clear({bit}), {room})" if room else f"bit_clear({bit})"
        ways.append(f"{rule({'const': value})} ws {name}_n::set_bit({bit}) %if {free}")
    # The comma is part of each way, so that there is none where no way is left.
    yield f'{name}: "[" ws {name}_o::0x0' + ("" if least else ' | "[" ws "]"')
    yield f"{name}_o::_: " + "\n  | ".join(ways)
    yield f"{name}_n::_: " + "\n  | ".join([*(f'"," ws {way}' for way in ways), f'"]" %if {end}'])


def _containing_rules(
    schema: dict[str, Any], rule: Rule, name: str, least: int, most: int | None
) -> Iterator[str]:
    """A rule for each combination of matches and items that makes a difference; it says what can still
    follow."""
    if "prefixItems" in schema:
        raise Untracked("the first items have other schemas")
    wanted, allowed = max(0, schema.get("minContains", 1)), schema.get("maxContains")
    if (allowed is not None and allowed < wanted) or (most is not None and most < max(least, wanted)):
        raise Untracked("no array has as few and as many items as required")
    hit, miss = rule(schema[HITS]), schema.get("items", True)
    other = None if miss is False else rule(miss)
    if most is None and least <= wanted and wanted:
        yield f'{name}: "[" ws {_in_turn(hit, other, wanted, allowed)} ws "]"'
        return
    last_hit = wanted if allowed is None else allowed
    last_item = least if most is None else most
    if (last_hit + 1) * (last_item + 1) > _MOST_STATES:
        raise Untracked("too many states would have to be counted")
    states = [(hits, items) for hits in range(last_hit + 1) for items in range(last_item + 1)]

    def ways(hits: int, items: int) -> Iterator[tuple[str, tuple[int, int]]]:
        if most is not None and items == most:
            return
        more = min(items + 1, last_item)
        if allowed is None or hits < allowed:
            yield hit, (min(hits + 1, last_hit), more)
        if other is not None:
            yield other, (hits, more)

    live = {state for state in states if state[0] >= wanted and state[1] >= least}
    ending, before = live.copy(), -1
    while before < len(live):
        before = len(live)
        live |= {state for state in states if any(after in live for _, after in ways(*state))}
    if (0, 0) not in live:
        raise Untracked("no array satisfies it")
    for state in sorted(live):
        one = f"{name}_{state[0]}_{state[1]}"
        items = [f"{item} ws {name}_{n}_{m}" for item, (n, m) in ways(*state) if (n, m) in live]
        yield f"{one}_i: " + " | ".join(items or ['"]"'])
        ends = ['"]"'] if state in ending else []
        yield f"{one}: " + " | ".join([*ends, *([f'"," ws {one}_i'] if items else [])])
    empty = ' | "[" ws "]"' if (0, 0) in ending else ""
    yield f'{name}: "[" ws {name}_0_0_i{empty}'


def _in_turn(hit: str, other: str | None, wanted: int, allowed: int | None) -> str:
    """Items of which some number must match, written as repetitions, which the library follows at any
    length."""
    before = "" if other is None else f'({other} ws "," ws)* '
    after = "" if other is None else f' (ws "," ws {other})*'
    more = f'(ws "," ws {before}{hit})'
    most = wanted - 1 if allowed is None else allowed - 1
    return f"{before}{hit} {more}{{{wanted - 1},{most}}}{after}" if most else f"{before}{hit}{after}"


def listed_values(document: Schema, schema: Any, depth: int = _DEPTH) -> list[Any] | None:
    """The distinct values of a schema that lists them. None if it does not, or lists too many."""
    found = _candidates(document, schema, depth)
    if found is None:
        return None
    here = (
        {**schema, **{key: document[key] for key in ("$defs", "definitions") if key in document}}
        if (isinstance(schema, dict) and isinstance(document, dict))
        else schema
    )
    valid = jsonschema_rs.validator_for(for_library(here), validate_formats=True)
    return [value for value in {named_value(one): one for one in found}.values() if valid.is_valid(value)]


def _candidates(document: Schema, schema: Any, depth: int) -> list[Any] | None:
    if not isinstance(schema, dict) or not depth:
        return [] if schema is False else None
    if "const" in schema or "enum" in schema:
        return [schema["const"]] if "const" in schema else list(schema["enum"])
    if "$ref" in schema:
        return _candidates(document, target(document, schema["$ref"]), depth - 1)
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            return _together([_candidates(document, one, depth - 1) for one in schema[keyword]])
    kinds = schema.get("type")
    return _together([_of_type(kind, schema) for kind in (kinds if isinstance(kinds, list) else [kinds])])


def _together(parts: list[list[Any] | None]) -> list[Any] | None:
    if any(part is None for part in parts):
        return None
    return [value for part in parts for value in part or ()]


def _of_type(kind: Any, schema: dict[str, Any]) -> list[Any] | None:
    if kind == "boolean":
        return [False, True]
    if kind == "null":
        return [None]
    low, high = schema.get("minimum"), schema.get("maximum")
    if kind == "integer" and isinstance(low, int) and isinstance(high, int) and high - low < BITS:
        return list(range(low, high + 1))
    return None
