"""A compiled grammar together with what it takes to close answers in time."""

from functools import cached_property

import msgspec
import numpy as np

from personae.errors import GrammarError
from personae.grammar.backend import CompiledGrammar, Matcher
from personae.grammar.closing.blueprint import Blueprint, Outline
from personae.grammar.closing.matcher import ClosingMatcher
from personae.grammar.closing.plan import Course, Plan, course
from personae.grammar.closing.planner import Hints, Planner
from personae.grammar.closing.reach import Reach, guessed
from personae.grammar.closing.table import TokenTable
from personae.grammar.closing.texts import Words
from personae.grammar.schema.document import MAX_SHORTEST, SCHEMA_PARAM, TOO_COMPLEX


class ClosingGrammar:
    """Shared by all answers that it binds; thread-safe.

    `inner` and `bytewise` are what the blueprint's outline compiles to.
    `shortest_plan` is the shortest answer that was found, None if none was: then answers are bound but not
    closed. `plain` are the tokens of plain text, if that leads away from the end by no more than itself.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        inner: CompiledGrammar,
        bytewise: CompiledGrammar | None,
        table: TokenTable,
    ) -> None:
        self.inner = inner
        self.table = table
        self._bytewise = bytewise
        self.texts = table.texts
        self._hints = _hints(blueprint.reach, table)
        self.shortest_plan = blueprint.plan
        self._varied = blueprint.varied
        self.reach = _at_least(blueprint.reach or guessed(self.shortest), self.shortest)
        is_plain = self.reach.plain is not None and self.reach.plain <= 1
        self.plain = table.plain(self.reach.barred) if is_plain else table.only()
        self._plain_example = next(iter(np.flatnonzero(self.plain)), None)

    @property
    def nbytes(self) -> int:
        """Bytes held, for the cache's bound."""
        return self.inner.nbytes + (self._bytewise.nbytes if self._bytewise is not None else 0)

    @cached_property
    def shortest_course(self) -> Course | None:
        """The shortest answer, to be written."""
        return self.shortest_plan and course(self.table, self.shortest_plan.piece)

    @property
    def shortest(self) -> int:
        """How many tokens an answer needs that is sure to be complete, the stop token not counted."""
        return max(1, len(self.shortest_plan.tokens)) if self.shortest_plan is not None else 1

    def matcher(self, budget: int | None = None) -> Matcher:
        """A new matcher at the start; of an answer that is complete within `budget` tokens, if there is one.

        A budget below `shortest` cannot be kept.
        """
        matcher = self.inner.matcher()
        if budget is None or self.shortest_plan is None:
            return matcher
        return ClosingMatcher(matcher, self, budget)

    def is_plain(self, words: Words) -> bool:
        """Whether a row of a bitmask allows all of `plain`, and there is any."""
        at = self._plain_example
        if at is None or self.plain[at] & ~words[at]:
            return False
        return not (self.plain & ~words).any()

    def bytewise(self) -> Matcher:
        """A new matcher over pieces. Only if there is a `shortest_plan`."""
        assert self._bytewise is not None
        return self._bytewise.matcher()

    def planner(self) -> Planner:
        """A planner for one answer."""
        return Planner(self._hints, self.table.bytewise_size, varied=self._varied)


def planned(
    outline: Outline, reach: Reach | None, bytewise: CompiledGrammar | None, table: TokenTable
) -> Blueprint:
    """The blueprint, with the shortest answer if one is found. `bytewise` is what its bytewise spec compiles
    to, `reach` the bounds of its answers.

    Raises GrammarError if none is found of a schema: its answers could not be closed.
    """
    plan, varied = None, False
    if bytewise is not None:
        hints = _hints(reach, table)
        plan = _shortest(bytewise, Planner(hints, table.bytewise_size), table)
        if plan is None and outline.inner.kind == "json_schema":
            plan = _shortest(bytewise, Planner(hints, table.bytewise_size, varied=True), table)
            varied = True
            if plan is None:
                raise GrammarError(
                    "No complete answer by the schema is found; make it simpler.",
                    param=SCHEMA_PARAM,
                    code=TOO_COMPLEX,
                )
    return Blueprint(outline, reach, plan, varied)


def _shortest(bytewise: CompiledGrammar, planner: Planner, table: TokenTable) -> Plan | None:
    piece = planner.plan(bytewise.matcher(), b"", MAX_SHORTEST)
    tokens = None if piece is None else table.spell_shortest(piece)
    return None if piece is None or tokens is None else Plan(piece, tuple(tokens))


def _hints(reach: Reach | None, table: TokenTable) -> Hints:
    known = reach or Reach()
    ends, exits = ([table.piece_of(text) for text in texts] for texts in (known.ends, known.exits))
    return Hints(known.hints, ends, exits, words_first=known.words_first, steps=known.steps)


def _at_least(reach: Reach, shortest: int) -> Reach:
    """The bounds, none of which is below what the search itself has found for the whole."""
    return msgspec.structs.replace(reach, rest=max(reach.rest, shortest - reach.lexeme))
