"""From a spec, as a backend takes it, to a grammar whose answers close."""

import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import get_native_id

import msgspec

from personae.grammar.backend import CompiledGrammar, GrammarBackend
from personae.grammar.closing.blueprint import Blueprint, Outline, Sketch
from personae.grammar.closing.grammar import ClosingGrammar, planned
from personae.grammar.closing.reach import Measure, Reach, guessed, pattern_bound, text_reach
from personae.grammar.closing.schema_reach import schema_reach
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
_YIELDING = 5  # how much nicer than others a thread is that compiles what is not small


def _yield_to_others() -> None:
    """Let the steps go first. On Linux a thread has a priority of its own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _YIELDING)


_BEHIND = ThreadPoolExecutor(32, "grammar-large", initializer=_yield_to_others)

_TOKEN_ID = re.compile(r"<\[")


class Compiling:
    """The compiles of an outline, over the model's tokens and over bytes, begun on threads of their own."""

    def __init__(self, outline: Outline, backend: GrammarBackend, bytewise: GrammarBackend) -> None:
        self.outline = outline
        self._inner = _BEHIND.submit(backend.compile, outline.inner)
        self._other: Future[CompiledGrammar] | None = None
        if outline.bytewise is not None:
            before = [self._inner] if len(outline.bytewise.source) > _LARGE else []
            self._other = _BEHIND.submit(_compile_after, before, bytewise, outline.bytewise)

    def grammar(self, blueprint: Blueprint, table: TokenTable) -> ClosingGrammar:
        """The grammar, whose outline it is. Raises GrammarError when it cannot be compiled."""
        wait([one for one in (self._inner, self._other) if one is not None])
        other = None if self._other is None else self._other.result()
        return ClosingGrammar(blueprint, self._inner.result(), other, table)


def _compile_after(
    before: list[Future[CompiledGrammar]], backend: GrammarBackend, spec: GrammarSpec
) -> CompiledGrammar:
    wait(before)
    return backend.compile(spec)


def build(
    sketch: Sketch, backend: GrammarBackend, bytewise: GrammarBackend, table: TokenTable
) -> ClosingGrammar:
    """Compile a sketch, over the model's tokens beside what is done over bytes.

    Raises GrammarError when it cannot be compiled.
    """
    outline = sketch.outline
    if outline.bytewise is None:
        inner = backend.compile(outline.inner)
        return ClosingGrammar(planned(outline, sketch.bounds(), None, table), inner, None, table)
    beside = _BESIDE.submit(backend.compile, outline.inner)
    try:
        other = bytewise.compile(outline.bytewise)
        blueprint = planned(outline, sketch.bounds(), other, table)
    finally:
        wait([beside])  # whoever asked has no more than its place's share of the cores
    return ClosingGrammar(blueprint, beside.result(), other, table)


def draft(
    sketch: Sketch,
    backend: GrammarBackend,
    bytewise: GrammarBackend,
    table: TokenTable,
    tell: Callable[[Outline], None],
) -> Blueprint:
    """The blueprint of a sketch, compiled once: over bytes, where that can be done. `tell` hears of the
    outline as soon as it has been.

    Raises GrammarError when it cannot be compiled.
    """
    outline = sketch.outline
    other = None
    if outline.bytewise is None:
        backend.compile(outline.inner)
    else:
        other = bytewise.compile(outline.bytewise)
    tell(outline)
    return planned(outline, sketch.bounds(), other, table)


def sketch_of(backend: str, spec: GrammarSpec, table: TokenTable) -> Sketch:
    """The sketch of a spec of any kind but "structure"."""
    bytewise = None if spec.kind == "lark" and names_tokens(spec.source) else spec
    return Sketch(Outline(backend, spec, bytewise), lambda: reach_of(spec, table))


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
