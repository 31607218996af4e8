"""From a spec, as a backend takes it, to a grammar whose answers close."""

import itertools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import msgspec

from personae.grammar.backend import GrammarBackend
from personae.grammar.closing.blueprint import Blueprint
from personae.grammar.closing.grammar import ClosingGrammar, planned
from personae.grammar.closing.reach import Measure, Reach, guessed, pattern_bound, schema_reach, text_reach
from personae.grammar.closing.table import TokenTable
from personae.grammar.schema.prepare import ANALYSIS_ERRORS
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.elements import (
    Element,
    Exactly,
    Json,
    Lark,
    OneOf,
    Regex,
    Repeat,
    Sequence,
    Text,
    Until,
    Verbatim,
)

# Backends compile without the interpreter's lock, so a second thread halves the time; but what takes a tenth
# of a second or more must not have two cores at once, which the steps may need. Idle threads cost nothing.
_LARGE = 100_000  # characters
_BESIDE = ThreadPoolExecutor(32, "grammar")

_TOKEN_ID = re.compile(r"<\[")


def build(
    blueprint: Blueprint, backend: GrammarBackend, bytewise: GrammarBackend, table: TokenTable
) -> ClosingGrammar:
    """Compile a blueprint twice: over the model's tokens and over bytes.

    Raises GrammarError when it cannot be compiled.
    """
    if blueprint.bytewise is None:
        return ClosingGrammar(blueprint, backend.compile(blueprint.inner), None, table)
    if len(blueprint.bytewise.source) > _LARGE:
        inner, other = backend.compile(blueprint.inner), bytewise.compile(blueprint.bytewise)
        return ClosingGrammar(blueprint, inner, other, table)
    second = _BESIDE.submit(bytewise.compile, blueprint.bytewise)
    try:
        inner = backend.compile(blueprint.inner)
    finally:
        wait([second])  # whoever asked has no more than its place's share of the cores
    return ClosingGrammar(blueprint, inner, second.result(), table)


def draft(
    blueprint: Blueprint, backend: GrammarBackend, bytewise: GrammarBackend, table: TokenTable
) -> Blueprint:
    """The blueprint with its shortest answer, compiled once: over bytes, where that can be done.

    Raises GrammarError when it cannot be compiled.
    """
    if blueprint.bytewise is None:
        backend.compile(blueprint.inner)
        return planned(blueprint, None, table)
    return planned(blueprint, bytewise.compile(blueprint.bytewise), table)


def blueprint_of(backend: str, spec: GrammarSpec, table: TokenTable) -> Blueprint:
    """The blueprint of a spec of any kind but "structure"."""
    bytewise = None if spec.kind == "lark" and names_tokens(spec.source) else spec
    return Blueprint(backend, spec, bytewise, reach_of(spec, table))


def names_tokens(source: str) -> bool:
    """Whether a grammar names tokens by their ids, which another vocabulary does not have."""
    return bool(_TOKEN_ID.search(source))


def reach_of(spec: GrammarSpec, table: TokenTable) -> Reach | None:
    """The bounds of a spec's answers; None where they are not known."""
    match spec.kind:
        case "json_object":
            return schema_reach({"type": "object"}, table.measure)
        case "json_schema":
            try:
                return schema_reach(json.loads(spec.source), table.measure)
            except ANALYSIS_ERRORS:
                return None
        case "regex":
            return pattern_bound(spec.source)
        case "choice":
            choices = [choice.encode() for choice in json.loads(spec.source)]
            choices.sort(key=lambda choice: (len(table.spell_shortest(choice) or choice), choice))
            longest = max(map(len, choices), default=0)
            return Reach(longest, plain=None, hints=tuple(choices), words_first=True)
    return None


def structure_reach(element: Element, measure: Measure) -> Reach:
    """The bounds of the answers of a structure whose schemas are those that are enforced."""
    exits = dict.fromkeys(filter(None, _exits(element, "")))
    return msgspec.structs.replace(_reach(element, measure), exits=tuple(exits))


def _exits(element: Element, after: str) -> Iterator[str]:
    """The fixed texts that follow repetitions, `after` being what follows the element itself."""
    match element:
        case Sequence(parts=parts):
            for part in reversed(parts):
                yield from _exits(part, after)
                after = _fixed(part) if isinstance(part, Exactly | Verbatim) else ""
        case OneOf(parts=parts):
            for part in parts:
                yield from _exits(part, after)
        case Repeat(part=part):
            yield after
            yield from _exits(part, "")


def _head(element: Element) -> str:
    """The fixed text with which an element begins, "" if it begins otherwise."""
    while isinstance(element, Sequence) and element.parts:
        element = element.parts[0]
    return _fixed(element) if isinstance(element, Exactly | Verbatim) else ""


def _differ(heads: list[str]) -> bool:
    """Whether none of them is the beginning of another."""
    heads = sorted(heads)
    return not any(after.startswith(before) for before, after in itertools.pairwise(heads))


def _fixed(part: Exactly | Verbatim) -> str:
    """The text without the blanks and the number that may be left out or differ."""
    return part.text if isinstance(part, Verbatim) else part.text.replace(" ", "").split("#")[0]


def _reach(element: Element, measure: Measure) -> Reach:
    match element:
        case Exactly(text=text) | Verbatim(text=text):
            return text_reach(measure, [text, "0000" * text.count("#")])
        case Text(without=without, openings=openings):
            return text_reach(measure, [], barred=(*without, *openings))
        case Until(end=end, openings=openings, without=without):
            return text_reach(measure, [], [end], barred=(*openings, *without))
        case Regex(pattern=pattern, without=without):
            return text_reach(measure, [], barred=without).then(pattern_bound(pattern))
        case Lark():
            return guessed(1)
        case Json(schema=schema):
            reach = schema_reach(schema, measure)
            return msgspec.structs.replace(reach, rest=reach.rest + reach.lexeme, roots=0, blanks=False)
        case Sequence(parts=parts):
            total = Reach(texts=True, endless=True)
            for part in parts:
                total = total.then(_reach(part, measure))
            return total
        case OneOf(parts=parts):
            total = Reach(texts=True, endless=True)
            for part in parts:
                total = total.beside(_reach(part, measure))
            return (
                total
                if _differ([_head(part) for part in parts])
                else msgspec.structs.replace(total, texts=False)
            )
        case Repeat(part=part, least=least):
            once = _reach(part, measure)
            return msgspec.structs.replace(once, rest=once.rest * max(least, 1))
