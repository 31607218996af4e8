"""A compiled grammar together with what is needed to close its answers in time."""

from functools import cached_property

import msgspec
import numpy as np

from personae.errors import GrammarError
from personae.grammar.backend import BackendMatcher, BoundGrammar, CompiledGrammar
from personae.grammar.budget.analysis import Analysis, PendingAnalysis
from personae.grammar.budget.completion import CompletionPath, PlannedCompletion, path
from personae.grammar.budget.distance_bound import DistanceBound, guessed
from personae.grammar.budget.matcher import BudgetMatcher
from personae.grammar.budget.planner import Hints, Planner
from personae.grammar.budget.string_masks import Words
from personae.grammar.budget.table import Piece, TokenTable
from personae.grammar.matcher import Matcher
from personae.grammar.schema.document import MAX_SHORTEST, PARAMS, TOO_COMPLEX

_USUAL = 4096  # bytes of nearly all shortest answers


class BudgetGrammar(BoundGrammar):
    """Shared by all answers that it binds. Thread-safe.

    `inner` and `bytewise` are compiled from the analysis's plan. `shortest_plan` is the shortest answer that
    was found. `plain` are the tokens of plain text, if each leads away from the end by no more than itself.
    `number_ends` are those that may follow a number; None if answers have no numbers.
    """

    def __init__(
        self,
        analysis: Analysis,
        inner: CompiledGrammar,
        bytewise: CompiledGrammar,
        table: TokenTable,
    ) -> None:
        self.analysis = analysis
        self.inner = inner
        self.over_bytes = bytewise
        self.table = table
        self.texts = table.texts
        self._hints = _hints(analysis.bound, table)
        self.shortest_plan = analysis.plan
        self._varied = analysis.varied
        self.bound = _at_least(analysis.bound or guessed(self.shortest), self.shortest)
        ends = self.bound.number_ends
        self.number_ends = None if ends is None else table.number_ends(ends)
        is_plain = self.bound.plain is not None and self.bound.plain <= 1
        self.plain = table.plain(self.bound.barred) if is_plain else table.only()
        self._plain_example = next(iter(np.flatnonzero(self.plain)), None)

    @property
    def nbytes(self) -> int:
        """Bytes held, for the cache's bound."""
        return self.inner.nbytes + self.over_bytes.nbytes

    @cached_property
    def shortest_path(self) -> CompletionPath | None:
        """The shortest answer, to be written."""
        return path(self.table, self.shortest_plan.piece)

    @property
    def shortest(self) -> int:
        """The number of tokens of an answer that is certain to be complete, without the stop token."""
        return max(1, len(self.shortest_plan.tokens))

    def matcher(self, budget: int | None = None) -> Matcher:
        """A new matcher at the start. With `budget`, its answer is complete within that many tokens.

        A budget below `shortest` cannot be kept.
        """
        matcher = self.inner.matcher()
        if budget is None:
            return matcher
        return BudgetMatcher(matcher, self, budget)

    def is_plain(self, words: Words) -> bool:
        """Whether a row of a bitmask allows all of `plain`, and there is any."""
        at = self._plain_example
        if at is None or self.plain[at] & ~words[at]:
            return False
        return not (self.plain & ~words).any()

    def bytewise(self) -> BackendMatcher:
        """A new matcher over pieces."""
        return self.over_bytes.matcher()

    def planner(self) -> Planner:
        """A planner for one answer."""
        return Planner(self._hints, self.table.bytewise_size, varied=self._varied)


def planned(pending: PendingAnalysis, bytewise: CompiledGrammar, table: TokenTable) -> Analysis:
    """The analysis, with the example or the shortest answer. `bytewise` is the compiled bytewise spec. The
    search must also find an answer from each of the entries.

    Raises GrammarError, with the entry's field, if none is found, because answers could not be closed.
    """
    compile_plan, bound = pending.compile_plan, pending.bounds()
    hints = _hints(bound, table)
    planner, varied = Planner(hints, table.bytewise_size), False
    for entry in pending.entries:
        matcher, piece = bytewise.matcher(), table.piece_of(entry.text)
        if matcher.feed(piece) == len(piece) and _completed(matcher, planner) is None:
            raise _endless("schema or grammar", entry.param)
    plan = None if pending.example is None else _spelled(tuple(pending.example.encode()), table)
    plan = plan or _shortest(bytewise, planner, table)
    if plan is None and compile_plan.inner.kind == "json_schema":
        plan = _shortest(bytewise, Planner(hints, table.bytewise_size, varied=True), table)
        varied = True
    if plan is None:
        kind = compile_plan.inner.kind
        raise _endless("schema" if kind == "json_schema" else "grammar", PARAMS.get(kind))
    return Analysis(compile_plan, bound, plan, varied)


def _endless(said: str, param: str | None) -> GrammarError:
    return GrammarError(
        f"No complete answer to the {said} was found; make it simpler.", param=param, code=TOO_COMPLEX
    )


def _shortest(bytewise: CompiledGrammar, planner: Planner, table: TokenTable) -> PlannedCompletion | None:
    piece = _completed(bytewise.matcher(), planner)
    return None if piece is None else _spelled(piece, table)


def _spelled(piece: Piece, table: TokenTable) -> PlannedCompletion | None:
    tokens = table.spell_shortest(piece)
    return None if tokens is None else PlannedCompletion(piece, tuple(tokens))


def _completed(matcher: BackendMatcher, planner: Planner) -> Piece | None:
    piece = planner.plan(matcher, b"", _USUAL)
    if piece is None:
        piece = planner.search(matcher, _USUAL)
    return planner.plan(matcher, b"", MAX_SHORTEST) if piece is None else piece


def _hints(bound: DistanceBound | None, table: TokenTable) -> Hints:
    known = bound or DistanceBound()
    ends, exits, texts = (
        [table.piece_of(text) for text in found] for found in (known.ends, known.exits, known.literals)
    )
    return Hints(
        known.hints,
        ends,
        exits,
        words_first=known.words_first,
        steps=known.steps,
        texts=texts,
        values=known.values,
    )


def _at_least(bound: DistanceBound, shortest: int) -> DistanceBound:
    """The bounds, with none below what the search itself has found for the whole answer."""
    return msgspec.structs.replace(bound, rest=max(bound.rest, shortest - bound.lexeme))
