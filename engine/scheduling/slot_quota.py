"""Slots and prompt tokens by tenant: those with more than their share make room for others that wait.

Virtual token counters decide who is admitted next, but they cannot take a slot back. A tenant that came first
with long answers would hold every slot until these end, and another tenant would wait all that time, however
little it was served. So while all slots are taken, the tenant furthest above its share gives one to the
tenant whose turn it is, if that one is below its own. The sequence admitted last goes back to the head of its
queue, and its pages go to the prefix cache. A tenant's share of the slots is by weight, among the tenants
that run or wait. A tenant that gives up a slot keeps at least its share, so slots do not go back and forth.

Memory is shared alike: while pages are short, the tenant furthest above its share of them gives those of the
sequence that it admitted last. They go to a tenant that stays within its own share with them. A sequence for
which there is no room, of a tenant that would exceed its share with it, delays no other tenant.

A sequence that alone needs more than its tenant's share would find no room for as long as others want it. So
if its tenant has no other, it has a *claim*: until it ends the others share what it leaves. One claim is
there at a time. The others give up sequences for it, but not their first, and wait only with what would
exceed their shares.

A step that has begun cannot be interrupted, and new requests wait for it. So a tenant is *over quota* if it
asks for more than its share of the slots, or if its prompts need more tokens than its share of a step, or if
some of its rows are left out of the step (`row_shares.py`). It is over quota, too, if its prompts would make
a step last and another tenant was served less. These prompts come after all others, whether they have begun
or not, and are spread over several steps. None of these takes much longer than a step in which all slots
decode, or than twice one without prompts (`row_shares.py`). Among tenants over quota, the least served goes
first in each step, and of one tenant's prompts the one that began first. A tenant is served what its rows and
prompt tokens take, in prompt tokens, by weight. What it did not ask for is credit for the tokens of one step
at most: otherwise one that asked for little would go before all others for as long, once it asks for much.

All this holds for as long as others are here or were here within the last `RECENT_SECONDS`, since they may
come back while a step runs. There is a quota only so long.
"""

import math
from collections import Counter
from collections.abc import Set
from typing import NamedTuple

from personae.engine.scheduling.fairness import FairnessKey

RECENT_SECONDS = 10.0  # for which the share of a tenant that left is kept


class OneTenant(NamedTuple):
    """The tenant that was here last, without others, and when it left; infinity: it has not."""

    name: str
    weight: float
    left: float = math.inf


class Claim(NamedTuple):
    """A tenant's sequence has as many pages, although that is more than the tenant's share."""

    tenant: str
    pages: int


class SlotQuota:
    """Counts the sequences of each tenant: all that have not ended, and those with a slot. It gets none that
    are background: these yield to all others anyway. `claim`: the one that is there."""

    __slots__ = (
        "_live",
        "_long",
        "_now",
        "_recent",
        "_served",
        "_slots_total",
        "_tokens",
        "_weights",
        "_with_slot",
        "claim",
    )

    def __init__(self, slots: int, tokens: int) -> None:
        self._slots_total = slots
        self._tokens = tokens
        self._served: dict[str, float] = {}  # by weight, of tenants that are here or were recently
        self._long: set[str] = set()  # tenants whose prompts needed more than their share of a step
        self._now = 0.0
        self._recent: dict[str, tuple[float, float]] = {}  # tenants that left: when, and their weight
        self._live: Counter[str] = Counter()
        self._with_slot: Counter[str] = Counter()
        self._weights: dict[str, float] = {}
        self.claim: Claim | None = None

    def remember(self, tenant: OneTenant) -> None:
        """A tenant was here recently."""
        self._served[tenant.name] = -1.0
        self._recent[tenant.name] = tenant.left, tenant.weight

    def enter(self, key: FairnessKey) -> None:
        """A sequence has arrived."""
        if key.tenant not in self._served:  # idle time earns no credit, but it goes before the others
            self._served[key.tenant] = min(self._served.values(), default=0.0) - 1.0
        self._live[key.tenant] += 1
        self._weights[key.tenant] = key.weight
        self._recent.pop(key.tenant, None)

    def leave(self, key: FairnessKey) -> None:
        """A sequence has ended."""
        self._live[key.tenant] -= 1
        if not self._live[key.tenant]:
            del self._live[key.tenant]
            self._recent[key.tenant] = self._now, self._weights.pop(key.tenant)

    def take_slot(self, key: FairnessKey) -> None:
        """A sequence takes a slot."""
        self._with_slot[key.tenant] += 1

    def leave_slot(self, key: FairnessKey) -> None:
        """A sequence leaves its slot."""
        self._with_slot[key.tenant] -= 1
        if not self._with_slot[key.tenant]:
            del self._with_slot[key.tenant]

    def giver_for(self, tenant: str) -> str | None:
        """The tenant that must give up a slot for this one; None if none must."""
        if len(self._live) < 2 or not self._below(tenant):
            return None
        giver = max(self._with_slot, key=lambda name: self._with_slot[name] - self._share(name), default=None)
        return None if giver is None or giver == tenant or not self._above(giver) else giver

    def giver_of_pages(
        self, held: Counter[str], pages: int, tenant: str | None = None, needed: int = 0
    ) -> str | None:
        """The tenant furthest above its share of all `pages`; None if none is above it, or if `tenant` would
        be with `needed` more. `held`: pages of the running sequences of each tenant."""
        if len(self._live) < 2:
            return None
        above = {name: held[name] - share for name, share in self._page_shares(pages).items()}
        if tenant is not None and above[tenant] + needed > 0:
            return None
        giver = max(above, key=above.__getitem__)
        return giver if above[giver] > 0 else None

    def giver_for_claim(self, held: Counter[str], pages: int, missing: int) -> str | None:
        """The tenant furthest above its share of all `pages` that would have a sequence left; None if there
        is none, or all of them together could not give the `missing` pages. `held`: as above."""
        shares = self._page_shares(pages)
        above = {name: held[name] - shares[name] for name, slots in self._with_slot.items() if slots > 1}
        giver = max(above, key=above.__getitem__, default=None)
        return giver if giver is not None and sum(max(n, 0.0) for n in above.values()) >= missing else None

    def exceeds_share(self, tenant: str, pages: int, needed: int) -> bool:
        """Whether a sequence of `needed` pages, its tenant's only one, has more than its share of all
        `pages`."""
        return not self._with_slot[tenant] and needed > self._page_shares(pages)[tenant]

    def stays_within_share(self, tenant: str, held: Counter[str], pages: int, needed: int) -> bool:
        """Whether a tenant with one more sequence, of `needed` pages, has at most its share of the slots and
        of all `pages`. A tenant without a slot always does while there is no claim, or it would wait forever.
        `held`: as above."""
        if not self._with_slot[tenant] and self.claim is None:
            return True
        return self._below(tenant) and held[tenant] + needed <= self._page_shares(pages)[tenant]

    def tick(self, now: float) -> None:
        """It is `now`, in seconds."""
        self._now = now
        while self._recent and next(iter(self._recent.values()))[0] + RECENT_SECONDS < now:
            tenant = next(iter(self._recent))
            del self._recent[tenant], self._served[tenant]

    @property
    def several(self) -> bool:
        """Whether several tenants are here or were recently. One alone is never over quota."""
        return len(self._live) + len(self._recent) > 1

    def last(self) -> OneTenant | None:
        """The tenant that is here or was recently, if at most one is."""
        here = [OneTenant(tenant, weight) for tenant, weight in self._weights.items()]
        gone = [OneTenant(tenant, weight, left) for tenant, (left, weight) in self._recent.items()]
        return next(iter(here + gone), None)

    def tenants(self) -> dict[str, float]:
        """The weight of each tenant that is here or was recently."""
        return {tenant: weight for tenant, (_, weight) in self._recent.items()} | self._weights

    def over_quota_tenants(
        self, prompts: Counter[str], limited: Set[str] = frozenset(), few: float = math.inf
    ) -> list[str]:
        """The tenants that ask for more than their share, in the step that is being planned, the least served
        first. `prompts`: the prompt tokens of each tenant that has some to plan. `limited`: the tenants some
        of whose rows are left out of the step. `few`: how many prompt tokens make no step last. A tenant
        whose prompts needed more than its share stays over quota while it has any: the last of many short
        ones are no single one."""
        weights = sum(self.tenants().values())
        asking = sum(self._weights[tenant] for tenant in prompts)
        if self._recent or len(prompts) < len(self._live):
            asking += 1.0  # for a prompt of the others
        least = min(self._served.values(), default=0.0)
        found = set(limited)
        for tenant, live in self._live.items():
            weight, tokens = self._weights[tenant], prompts[tenant]
            share = self._tokens * weight / asking
            if not tokens or asking <= weight:
                self._long.discard(tenant)
            elif tokens > share:
                self._long.add(tenant)
            if (
                live > max(self._slots_total * weight / weights, 1)
                or tenant in self._long
                or (asking > weight and self._served[tenant] > least and tokens > few)
            ):
                found.add(tenant)
        self._end_credit(found & (limited | prompts.keys()))
        return sorted(found, key=lambda tenant: (self._served[tenant], tenant))

    def _end_credit(self, behind: Set[str]) -> None:
        """Tenants that need not wait count as served at most the tokens of a step less than those `behind`;
        if nobody has to wait, than any."""
        served = self._served
        least = min((served[tenant] for tenant in behind), default=max(served.values(), default=0.0))
        for tenant in served.keys() - behind:
            served[tenant] = max(served[tenant], least - self._tokens)

    def serve(self, tenant: str, tokens: float) -> None:
        """A tenant has so many tokens in the step."""
        self._served[tenant] += tokens / self._weights[tenant]

    def check_integrity(self, live: Counter[str], with_slot: Counter[str]) -> None:
        """Raises AssertionError unless the counts are these."""
        assert self._live == live, f"live sequences by tenant: {self._live}, not {live}"
        assert self._with_slot == with_slot, f"slots by tenant: {self._with_slot}, not {with_slot}"
        assert self._weights.keys() == live.keys(), "weights of tenants without sequences"

    def _page_shares(self, pages: int) -> dict[str, float]:
        """The share of each tenant that is here of all `pages`."""
        total, claim = sum(self._weights.values()), self.claim
        shares = {name: pages * weight / total for name, weight in self._weights.items()}
        if claim is None or len(shares) < 2 or claim.pages <= shares.get(claim.tenant, math.inf):
            return shares
        factor = (1 - claim.pages / pages) / (1 - self._weights[claim.tenant] / total)
        shares = {name: share * factor for name, share in shares.items()}
        shares[claim.tenant] = float(claim.pages)
        return shares

    def _share(self, tenant: str) -> float:
        return self._slots_total * self._weights[tenant] / sum(self._weights.values())

    def _below(self, tenant: str) -> bool:
        return self._with_slot[tenant] + 1 <= max(self._share(tenant), 1)

    def _above(self, tenant: str) -> bool:
        return self._with_slot[tenant] - 1 >= self._share(tenant)
