"""What analysing a spec comes to: plain data, from which its grammar is made at a backend's cost alone."""

import msgspec

from personae.grammar.closing.plan import Plan
from personae.grammar.closing.reach import Reach
from personae.grammar.spec import GrammarSpec


class Blueprint(msgspec.Struct, frozen=True, tag=True):
    """What to have compiled by which backend, and the bounds of the answers, None where they are not known.

    `inner` is over the model's tokens; `bytewise` the same over bytes, None if there is no such grammar.
    `plan` is the shortest answer, once it has been looked for (`planned`) and if one was found; `varied` if
    only a search that varies what it writes finds one.
    """

    backend: str
    inner: GrammarSpec
    bytewise: GrammarSpec | None
    reach: Reach | None
    plan: Plan | None = None
    planned: bool = False
    varied: bool = False
