"""From a spec, as a backend takes it, to a grammar whose answers close."""

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import get_native_id

import msgspec

from personae.grammar.backend import CompiledGrammar, GrammarBackend
from personae.grammar.closing.blueprint import Blueprint, Outline, Sketch
from personae.grammar.closing.grammar import ClosingGrammar, planned
from personae.grammar.closing.reach import (
    Reach,
    grammar_literals,
    guessed,
    pattern_bound,
)
from personae.grammar.closing.schema_reach import schema_reach
from personae.grammar.closing.table import TokenTable
from personae.grammar.closing.token_ids import over_bytes
from personae.grammar.schema.prepare import ANALYSIS_ERRORS
from personae.grammar.spec import GrammarSpec

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

_MOST_LITERALS = 1024


class Compiling:
    """The compiles of an outline, over the model's tokens and over bytes, begun on threads of their own."""

    def __init__(self, outline: Outline, backend: GrammarBackend, bytewise: GrammarBackend) -> None:
        self.outline = outline
        self._inner = _BEHIND.submit(backend.compile, outline.inner)
        before = [self._inner] if len(outline.bytewise.source) > _LARGE else []
        self._other = _BEHIND.submit(_compile_after, before, bytewise, outline.bytewise)

    def grammar(self, blueprint: Blueprint, table: TokenTable) -> ClosingGrammar:
        """The grammar, whose outline it is. Raises GrammarError when it cannot be compiled."""
        wait([self._inner, self._other])
        return ClosingGrammar(blueprint, self._inner.result(), self._other.result(), table)


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
    beside = _BESIDE.submit(backend.compile, outline.inner)
    try:
        other = bytewise.compile(outline.bytewise)
        blueprint = planned(outline, sketch.bounds(), other, table, sketch.entries)
    finally:
        wait([beside])  # whoever asked has no more than its place's share of the cores
    return ClosingGrammar(blueprint, beside.result(), other, table)


def draft(
    sketch: Sketch,
    bytewise: GrammarBackend,
    table: TokenTable,
    tell: Callable[[Outline], None],
) -> Blueprint:
    """The blueprint of a sketch, compiled once: over bytes. `tell` hears of the
    outline as soon as it has been.

    Raises GrammarError when it cannot be compiled.
    """
    outline = sketch.outline
    other = bytewise.compile(outline.bytewise)
    tell(outline)
    return planned(outline, sketch.bounds(), other, table, sketch.entries)


def sketch_of(backend: str, spec: GrammarSpec, table: TokenTable) -> Sketch:
    """The sketch of a spec of any kind but "structure"."""
    bytewise = spec
    if spec.kind == "lark":
        bytewise = msgspec.structs.replace(spec, source=over_bytes(spec.source, table))
    return Sketch(Outline(backend, spec, bytewise), lambda: reach_of(spec, table))


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
        case "lark" | "ebnf":
            return guessed(1, grammar_literals(spec.source))
    return None
