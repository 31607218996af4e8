"""The result of analysing a spec: plain data, from which a grammar is made at the cost of a backend's compile
alone."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from personae.grammar.budget.completion import PlannedCompletion
from personae.grammar.budget.distance_bound import DistanceBound
from personae.grammar.spec import GrammarSpec


class CompilePlan(msgspec.Struct, frozen=True, tag=True):
    """What to compile, and with which backend. It is known before it is known how answers can end.

    `inner` is over the model's tokens; `bytewise` is the same over bytes.
    """

    backend: str
    inner: GrammarSpec
    bytewise: GrammarSpec


@dataclass(frozen=True, slots=True)
class Entry:
    """How an answer begins that has reached a part which the caller wrote, and that part's field."""

    text: str
    param: str


@dataclass(frozen=True, slots=True)
class PendingAnalysis:
    """A compile plan, and a function that finds the bounds of its answers; None if they cannot be known.
    `entries` are those of its parts. `example`: a complete answer, where one is known."""

    compile_plan: CompilePlan
    bounds: Callable[[], DistanceBound | None]
    entries: tuple[Entry, ...] = ()
    example: str | None = None


class Analysis(msgspec.Struct, frozen=True, tag=True):
    """A compile plan and the bounds of its answers, None if they are not known.

    `plan` is the shortest answer that was found. `varied`: only a search that varies what it writes finds
    one.
    """

    compile_plan: CompilePlan
    bound: DistanceBound | None
    plan: PlannedCompletion
    varied: bool = False
