"""Turns a spec, in the form that a backend takes, into a grammar whose answers close."""

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

# Backends compile without the interpreter's lock, so a second thread halves the time. But a compile that
# takes a tenth of a second or more must not use two cores at once, which the steps may need. Idle threads
# cost nothing.
_LARGE = 100_000  # characters
_EXECUTOR = ThreadPoolExecutor(32, "grammar")
_NICENESS = 5  # added to the niceness of threads that compile what is not small


def _yield_to_others() -> None:
    """Let the steps go first. On Linux each thread has a priority of its own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)


_LOW_PRIORITY = ThreadPoolExecutor(32, "grammar-large", initializer=_yield_to_others)

_MOST_LITERALS = 1024


class Compiling:
    """The compiles of a plan over the model's tokens and over bytes, started on threads of their own."""

    def __init__(self, compile_plan: CompilePlan, backend: GrammarBackend, bytewise: GrammarBackend) -> None:
        self.compile_plan = compile_plan
        self._inner = _LOW_PRIORITY.submit(backend.compile, compile_plan.inner)
        before = [self._inner] if len(compile_plan.bytewise.source) > _LARGE else []
        self._other = _LOW_PRIORITY.submit(_compile_after, before, bytewise, compile_plan.bytewise)

    def grammar(self, analysis: Analysis, table: TokenTable) -> BudgetGrammar:
        """The grammar for the analysis of this plan. Raises GrammarError if it cannot be compiled."""
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
    """Compile a spec over the model's tokens, and at the same time over bytes.

    Raises GrammarError if it cannot be compiled.
    """
    compile_plan = pending.compile_plan
    inner = _EXECUTOR.submit(backend.compile, compile_plan.inner)
    try:
        other = bytewise.compile(compile_plan.bytewise)
        analysis = planned(pending, other, table)
    finally:
        wait([inner])  # so that the caller's place uses no more than its share of the cores
    return BudgetGrammar(analysis, inner.result(), other, table)


def analyse(
    pending: PendingAnalysis,
    bytewise: GrammarBackend,
    table: TokenTable,
    report: Callable[[CompilePlan], None],
) -> Analysis:
    """Analyse a spec with a single compile, over bytes. Calls `report` with the compile plan as soon as that
    compile has ended.

    Raises GrammarError if it cannot be compiled.
    """
    compile_plan = pending.compile_plan
    other = bytewise.compile(compile_plan.bytewise)
    report(compile_plan)
    return planned(pending, other, table)


def analysis_of(backend: str, spec: GrammarSpec, table: TokenTable) -> PendingAnalysis:
    """The pending analysis of a spec of any kind but "structure"."""
    bytewise = spec
    if spec.kind == "lark":
        bytewise = msgspec.structs.replace(spec, source=over_bytes(spec.source, table))
    return PendingAnalysis(CompilePlan(backend, spec, bytewise), lambda: bound_of(spec, table))


def bound_of(spec: GrammarSpec, table: TokenTable) -> DistanceBound | None:
    """The bounds of a spec's answers. None if they are not known."""
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
