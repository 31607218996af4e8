"""Seats by tenant: who has more than its share gives one back when another, who has less, waits.

Virtual token counters decide who is admitted next; they cannot take back what was given. A tenant that came
first with long answers would hold every seat until its answers end, and another would wait for all that
time, however little it was served. So while all seats are taken, one of the tenant furthest above its share
is given to the tenant whose turn it is, if that one is below its own: the sequence admitted last goes back
to the head of its queue, its pages to the prefix cache. A tenant's share of the seats is by weight, among
those that run or wait; whoever gives keeps at least its share, so nothing goes to and fro.
"""

from collections import Counter

from personae.engine.fairness import Key


class Shares:
    """Counts the sequences of each tenant: those that live, and those that have a seat. Background ones are
    not counted; they give way to everybody anyway."""

    __slots__ = ("_live", "_seated", "_seats", "_weights")

    def __init__(self, seats: int) -> None:
        self._seats = seats
        self._live: Counter[str] = Counter()
        self._seated: Counter[str] = Counter()
        self._weights: dict[str, float] = {}

    def enter(self, key: Key) -> None:
        """A sequence has come."""
        if not key.background:
            self._live[key.tenant] += 1
            self._weights[key.tenant] = key.weight

    def leave(self, key: Key) -> None:
        """A sequence is gone."""
        if not key.background:
            self._live[key.tenant] -= 1
            if not self._live[key.tenant]:
                del self._live[key.tenant], self._weights[key.tenant]

    def sit(self, key: Key) -> None:
        """A sequence takes a seat."""
        if not key.background:
            self._seated[key.tenant] += 1

    def stand(self, key: Key) -> None:
        """A sequence leaves its seat."""
        if not key.background:
            self._seated[key.tenant] -= 1
            if not self._seated[key.tenant]:
                del self._seated[key.tenant]

    def giver_for(self, tenant: str) -> str | None:
        """The tenant that is to give a seat to this one; None if nobody has to."""
        if len(self._live) < 2 or not self._below(tenant):
            return None
        giver = max(self._seated, key=lambda name: self._seated[name] - self._share(name), default=None)
        return None if giver is None or giver == tenant or not self._above(giver) else giver

    def check_integrity(self, live: Counter[str], seated: Counter[str]) -> None:
        """Raises AssertionError unless the counts are these."""
        assert self._live == live, f"living sequences by tenant: {self._live}, not {live}"
        assert self._seated == seated, f"seats by tenant: {self._seated}, not {seated}"
        assert self._weights.keys() == live.keys(), "weights of tenants that are not here"

    def _share(self, tenant: str) -> float:
        return self._seats * self._weights[tenant] / sum(self._weights.values())

    def _below(self, tenant: str) -> bool:
        return self._seated[tenant] + 1 <= max(self._share(tenant), 1)

    def _above(self, tenant: str) -> bool:
        return self._seated[tenant] - 1 >= self._share(tenant)
