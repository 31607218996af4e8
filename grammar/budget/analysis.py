"""What analysing a spec comes to: plain data, from which its grammar is made at a backend's cost alone."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from personae.grammar.budget.completion import PlannedCompletion
from personae.grammar.budget.distance_bound import DistanceBound
from personae.grammar.spec import GrammarSpec


class CompilePlan(msgspec.Struct, frozen=True, tag=True):
    """What to have compiled, and by which backend: known before it is known how answers can end.

    `inner` is over the model's tokens; `bytewise` the same over bytes.
    """

    backend: str
    inner: GrammarSpec
    bytewise: GrammarSpec


@dataclass(frozen=True, slots=True)
class Entry:
    """How an answer begins that has come to a part which the caller wrote, and the field of that."""

    text: str
    param: str


@dataclass(frozen=True, slots=True)
class PendingAnalysis:
    """An outline, and what finds the bounds of its answers; None where they cannot be known. `entries`: of
    its parts."""

    compile_plan: CompilePlan
    bounds: Callable[[], DistanceBound | None]
    entries: tuple[Entry, ...] = ()


class Analysis(msgspec.Struct, frozen=True, tag=True):
    """An outline, and the bounds of its answers, None where they are not known.

    `plan` is the shortest answer that was found; `varied` if only a search that varies what it writes finds
    one.
    """

    compile_plan: CompilePlan
    bound: DistanceBound | None
    plan: PlannedCompletion
    varied: bool = False
