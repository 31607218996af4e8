"""What analysing a spec comes to: plain data, from which its grammar is made at a backend's cost alone."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from personae.grammar.closing.plan import Plan
from personae.grammar.closing.reach import Reach
from personae.grammar.spec import GrammarSpec


class Outline(msgspec.Struct, frozen=True, tag=True):
    """What to have compiled, and by which backend: known before it is known how answers can end.

    `inner` is over the model's tokens; `bytewise` the same over bytes, None if there is no such grammar.
    """

    backend: str
    inner: GrammarSpec
    bytewise: GrammarSpec | None


@dataclass(frozen=True, slots=True)
class Sketch:
    """An outline, and what finds the bounds of its answers; None where they cannot be known."""

    outline: Outline
    bounds: Callable[[], Reach | None]


class Blueprint(msgspec.Struct, frozen=True, tag=True):
    """An outline, and the bounds of its answers, None where they are not known.

    `plan` is the shortest answer if one was found; `varied` if only a search that varies what it writes finds
    one.
    """

    outline: Outline
    reach: Reach | None
    plan: Plan | None = None
    varied: bool = False
