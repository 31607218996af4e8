"""Seats by tenant: who has more than its share gives one back when another, who has less, waits.

Virtual token counters decide who is admitted next; they cannot take back what was given. A tenant that came
first with long answers would hold every seat until its answers end, and another would wait for all that
time, however little it was served. So while all seats are taken, one of the tenant furthest above its share
is given to the tenant whose turn it is, if that one is below its own: the sequence admitted last goes back
to the head of its queue, its pages to the prefix cache. A tenant's share of the seats is by weight, among
those that run or wait; whoever gives keeps at least its share, so nothing goes to and fro.

Nor can a step be taken back that has begun, and whoever comes has to wait for it. So tenants that ask for
more than their share of the seats, that of others who were here lately set aside, *crowd*: when many prompts
of theirs begin at once, these are spread over several steps, none of which takes much longer than one in
which all seats decode.
"""

from collections import Counter

from personae.engine.scheduling.fairness import FairnessKey

LATELY = 256  # steps


class SlotQuota:
    """Counts the sequences of each tenant: those that live, and those that have a seat. Background ones are
    not counted; they give way to everybody anyway."""

    __slots__ = ("_lately", "_live", "_slots_total", "_step", "_weights", "_with_slot")

    def __init__(self, slots: int) -> None:
        self._slots_total = slots
        self._step = 0
        self._lately: dict[str, tuple[int, float]] = {}  # who is gone: since which step, its weight
        self._live: Counter[str] = Counter()
        self._with_slot: Counter[str] = Counter()
        self._weights: dict[str, float] = {}

    def enter(self, key: FairnessKey) -> None:
        """A sequence has come."""
        if not key.background:
            self._live[key.tenant] += 1
            self._weights[key.tenant] = key.weight
            self._lately.pop(key.tenant, None)

    def leave(self, key: FairnessKey) -> None:
        """A sequence is gone."""
        if not key.background:
            self._live[key.tenant] -= 1
            if not self._live[key.tenant]:
                del self._live[key.tenant]
                self._lately[key.tenant] = self._step, self._weights.pop(key.tenant)

    def take_slot(self, key: FairnessKey) -> None:
        """A sequence takes a seat."""
        if not key.background:
            self._with_slot[key.tenant] += 1

    def leave_slot(self, key: FairnessKey) -> None:
        """A sequence leaves its seat."""
        if not key.background:
            self._with_slot[key.tenant] -= 1
            if not self._with_slot[key.tenant]:
                del self._with_slot[key.tenant]

    def giver_for(self, tenant: str) -> str | None:
        """The tenant that is to give a seat to this one; None if nobody has to."""
        if len(self._live) < 2 or not self._below(tenant):
            return None
        giver = max(self._with_slot, key=lambda name: self._with_slot[name] - self._share(name), default=None)
        return None if giver is None or giver == tenant or not self._above(giver) else giver

    def over_quota_tenants(self) -> set[str]:
        """In the step that is being planned: the tenants that ask for more than their share. Nobody does who
        is alone."""
        self._step += 1
        while self._lately and next(iter(self._lately.values()))[0] + LATELY < self._step:
            del self._lately[next(iter(self._lately))]
        if len(self._live) + len(self._lately) < 2:
            return set()
        weights = sum(self._weights.values()) + sum(weight for _, weight in self._lately.values())
        return {
            tenant
            for tenant, live in self._live.items()
            if live > max(self._slots_total * self._weights[tenant] / weights, 1)
        }

    def check_integrity(self, live: Counter[str], seated: Counter[str]) -> None:
        """Raises AssertionError unless the counts are these."""
        assert self._live == live, f"living sequences by tenant: {self._live}, not {live}"
        assert self._with_slot == seated, f"seats by tenant: {self._with_slot}, not {seated}"
        assert self._weights.keys() == live.keys(), "weights of tenants that are not here"

    def _share(self, tenant: str) -> float:
        return self._slots_total * self._weights[tenant] / sum(self._weights.values())

    def _below(self, tenant: str) -> bool:
        return self._with_slot[tenant] + 1 <= max(self._share(tenant), 1)

    def _above(self, tenant: str) -> bool:
        return self._with_slot[tenant] - 1 >= self._share(tenant)
