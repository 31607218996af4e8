"""From a spec, as a backend takes it, to a grammar whose answers close."""

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import get_native_id

import msgspec

from personae.grammar.backend import CompiledGrammar, GrammarBackend
from personae.grammar.budget.analysis import Analysis, CompilePlan, PendingAnalysis
from personae.grammar.budget.distance_bound import (
    DistanceBound,
    grammar_literals,
    guessed,
    pattern_bound,
)
from personae.grammar.budget.grammar import BudgetGrammar, planned
from personae.grammar.budget.schema_bound import schema_bound
from personae.grammar.budget.table import TokenTable
from personae.grammar.budget.token_ids import over_bytes
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

    def __init__(self, compile_plan: CompilePlan, backend: GrammarBackend, bytewise: GrammarBackend) -> None:
        self.compile_plan = compile_plan
        self._inner = _BEHIND.submit(backend.compile, compile_plan.inner)
        before = [self._inner] if len(compile_plan.bytewise.source) > _LARGE else []
        self._other = _BEHIND.submit(_compile_after, before, bytewise, compile_plan.bytewise)

    def grammar(self, analysis: Analysis, table: TokenTable) -> BudgetGrammar:
        """The grammar, whose outline it is. Raises GrammarError when it cannot be compiled."""
        wait([self._inner, self._other])
        return BudgetGrammar(analysis, self._inner.result(), self._other.result(), table)


def _compile_after(
    before: list[Future[CompiledGrammar]], backend: GrammarBackend, spec: GrammarSpec
) -> CompiledGrammar:
    wait(before)
    return backend.compile(spec)


def build(
    pending: PendingAnalysis, backend: GrammarBackend, bytewise: GrammarBackend, table: TokenTable
) -> BudgetGrammar:
    """Compile a sketch, over the model's tokens beside what is done over bytes.

    Raises GrammarError when it cannot be compiled.
    """
    compile_plan = pending.compile_plan
    beside = _BESIDE.submit(backend.compile, compile_plan.inner)
    try:
        other = bytewise.compile(compile_plan.bytewise)
        analysis = planned(compile_plan, pending.bounds(), other, table, pending.entries)
    finally:
        wait([beside])  # whoever asked has no more than its place's share of the cores
    return BudgetGrammar(analysis, beside.result(), other, table)


def draft(
    pending: PendingAnalysis,
    bytewise: GrammarBackend,
    table: TokenTable,
    tell: Callable[[CompilePlan], None],
) -> Analysis:
    """The blueprint of a sketch, compiled once: over bytes. `tell` hears of the
    outline as soon as it has been.

    Raises GrammarError when it cannot be compiled.
    """
    compile_plan = pending.compile_plan
    other = bytewise.compile(compile_plan.bytewise)
    tell(compile_plan)
    return planned(compile_plan, pending.bounds(), other, table, pending.entries)


def analysis_of(backend: str, spec: GrammarSpec, table: TokenTable) -> PendingAnalysis:
    """The sketch of a spec of any kind but "structure"."""
    bytewise = spec
    if spec.kind == "lark":
        bytewise = msgspec.structs.replace(spec, source=over_bytes(spec.source, table))
    return PendingAnalysis(CompilePlan(backend, spec, bytewise), lambda: reach_of(spec, table))


def reach_of(spec: GrammarSpec, table: TokenTable) -> DistanceBound | None:
    """The bounds of a spec's answers; None where they are not known."""
    match spec.kind:
        case "json_object":
            return schema_bound({"type": "object"}, table.measure)
        case "json_schema":
            try:
                return schema_bound(json.loads(spec.source), table.measure, any_order=spec.any_order)
            except ANALYSIS_ERRORS:
                return None
        case "regex":
            return pattern_bound(spec.source)
        case "choice":
            choices = [choice.encode() for choice in json.loads(spec.source)]
            choices.sort(key=lambda choice: (len(table.spell_shortest(choice) or choice), choice))
            longest = max(map(len, choices), default=0)
            return DistanceBound(longest, plain=None, hints=tuple(choices), words_first=True)
        case "lark" | "ebnf":
            return guessed(1, grammar_literals(spec.source))
    return None
