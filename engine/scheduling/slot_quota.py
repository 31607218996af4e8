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

A step that has begun cannot be interrupted, and new requests wait for it. So a tenant is *over quota* if it
asks for more than its share of the slots, with shares kept for other tenants that were here recently, or if
its prompts need more tokens than its share of a step, or if some of its rows are left out of the step
(`row_shares.py`). These prompts come after all others, whether they have begun or not, and are spread over
several steps. None of these takes much longer than a step in which all slots decode, or than twice one
without prompts. Among tenants over quota, the one whose prompts had the fewest tokens goes first in each
step. A tenant that has been left alone has shorter steps for a while, since the others may come back.
"""

from collections import Counter
from collections.abc import Set

from personae.engine.scheduling.fairness import FairnessKey

RECENT = 256  # steps for which the share of a tenant that left is kept
JUST_LEFT = 32  # steps for which its share of the prompt tokens is kept: long prompts are slower meanwhile


class SlotQuota:
    """Counts the sequences of each tenant: all that have not ended, and those with a slot. Background
    sequences do not count, because they yield to all others anyway."""

    __slots__ = ("_live", "_recent", "_served", "_slots_total", "_step", "_tokens", "_weights", "_with_slot")

    def __init__(self, slots: int, tokens: int) -> None:
        self._slots_total = slots
        self._tokens = tokens
        self._served: dict[str, float] = {}  # prompt tokens by weight, while a tenant is over quota
        self._step = 0
        self._recent: dict[str, tuple[int, float]] = {}  # tenants that left: in which step, their weight
        self._live: Counter[str] = Counter()
        self._with_slot: Counter[str] = Counter()
        self._weights: dict[str, float] = {}

    def enter(self, key: FairnessKey) -> None:
        """A sequence has arrived."""
        if not key.background:
            self._live[key.tenant] += 1
            self._weights[key.tenant] = key.weight
            self._recent.pop(key.tenant, None)

    def leave(self, key: FairnessKey) -> None:
        """A sequence has ended."""
        if not key.background:
            self._live[key.tenant] -= 1
            if not self._live[key.tenant]:
                del self._live[key.tenant]
                self._recent[key.tenant] = self._step, self._weights.pop(key.tenant)

    def take_slot(self, key: FairnessKey) -> None:
        """A sequence takes a slot."""
        if not key.background:
            self._with_slot[key.tenant] += 1

    def leave_slot(self, key: FairnessKey) -> None:
        """A sequence leaves its slot."""
        if not key.background:
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
        weights = sum(self._weights.values())
        above = {name: held[name] - pages * weight / weights for name, weight in self._weights.items()}
        if tenant is not None and above[tenant] + needed > 0:
            return None
        giver = max(above, key=above.__getitem__)
        return giver if above[giver] > 0 else None

    def stays_within_share(self, tenant: str, held: Counter[str], pages: int, needed: int) -> bool:
        """Whether a tenant with one more sequence, of `needed` pages, has at most its share of the slots and
        of all `pages`. A tenant without a slot always does, or it would wait forever. `held`: as above."""
        if not self._with_slot[tenant]:
            return True
        share = pages * self._weights[tenant] / sum(self._weights.values())
        return self._below(tenant) and held[tenant] + needed <= share

    def begin_step(self) -> bool:
        """A step is planned. False if there is one tenant, which is never over quota."""
        self._step += 1
        while self._recent and next(iter(self._recent.values()))[0] + RECENT < self._step:
            del self._recent[next(iter(self._recent))]
        return len(self._live) + len(self._recent) > 1

    @property
    def left_alone(self) -> bool:
        """Whether one tenant is here, and others were recently."""
        return len(self._live) == 1 and bool(self._recent)

    def tenants(self) -> dict[str, float]:
        """The weight of each tenant that is here or has just left."""
        left = {
            tenant: weight
            for tenant, (step, weight) in self._recent.items()
            if step + JUST_LEFT >= self._step
        }
        return left | self._weights

    def over_quota_tenants(self, prompts: Counter[str], limited: Set[str] = frozenset()) -> list[str]:
        """The tenants that ask for more than their share, in the step that is being planned, the least served
        first. `prompts`: the prompt tokens of each tenant that has some to plan. `limited`: the tenants some
        of whose rows are left out of the step. A tenant stays over quota while it has prompts: the last of
        many short ones are no single one."""
        weights = sum(self._weights.values()) + sum(weight for _, weight in self._recent.values())
        asking = sum(self._weights[tenant] for tenant in prompts)
        left = max((step for step, _ in self._recent.values()), default=-RECENT)
        if len(prompts) < len(self._live) or left + JUST_LEFT >= self._step:
            asking += 1.0  # for a prompt of the others
        found = limited | {
            tenant
            for tenant, live in self._live.items()
            if live > max(self._slots_total * (weight := self._weights[tenant]) / weights, 1)
            or (
                asking > weight
                and prompts[tenant] > (0 if tenant in self._served else self._tokens * weight / asking)
            )
        }
        floor = min((self._served[tenant] for tenant in found if tenant in self._served), default=0.0)
        known, self._served = self._served, {tenant: self._served.get(tenant, floor) for tenant in found}
        return sorted(found, key=lambda tenant: (self._served[tenant], tenant in known, tenant))

    def serve(self, tenant: str, tokens: int) -> None:
        """A tenant over quota has so many prompt tokens in the step."""
        self._served[tenant] += tokens / self._weights[tenant]

    def check_integrity(self, live: Counter[str], with_slot: Counter[str]) -> None:
        """Raises AssertionError unless the counts are these."""
        assert self._live == live, f"live sequences by tenant: {self._live}, not {live}"
        assert self._with_slot == with_slot, f"slots by tenant: {self._with_slot}, not {with_slot}"
        assert self._weights.keys() == live.keys(), "weights of tenants without sequences"

    def _share(self, tenant: str) -> float:
        return self._slots_total * self._weights[tenant] / sum(self._weights.values())

    def _below(self, tenant: str) -> bool:
        return self._with_slot[tenant] + 1 <= max(self._share(tenant), 1)

    def _above(self, tenant: str) -> bool:
        return self._with_slot[tenant] - 1 >= self._share(tenant)
