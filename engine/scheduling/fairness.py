"""Fairness: which waiting sequence goes next.

The scheduler keeps one queue per key, a key being (tenant, adapter), in order of arrival. A policy only ranks
the keys. Within a key, priority and order of arrival decide.
"""

from collections.abc import Collection
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import NamedTuple, Protocol

INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0  # of tokens


class FairnessKey(NamedTuple):
    """Tenant, adapter digest (None: the base model), whether its sequences are background, and the tenant's
    weight: with twice the weight it gets twice the service."""

    tenant: str
    adapter: str | None
    background: bool = False
    weight: float = 1.0


class FairnessPolicy(Protocol):
    """Chooses among keys with waiting sequences. One instance serves one scheduler."""

    def offer(self, key: FairnessKey, order: int) -> None:
        """The sequence with arrival number `order` is now first in the queue of `key`."""

    def withdraw(self, key: FairnessKey) -> None:
        """The queue of `key` is empty."""

    def choose(self, behind: Collection[str] = (), of: Collection[str] | None = None) -> FairnessKey:
        """The key whose first sequence goes next. At least one key is on offer. Among equal keys, the policy
        takes those of tenants in `behind` last. With `of` only the keys of these tenants count, of which one
        is on offer that is not background."""

    def charge(self, key: FairnessKey, input_tokens: int, output_tokens: int) -> None:
        """`key` was served this much."""

    def forget(self, key: FairnessKey) -> None:
        """`key` has no sequence left, waiting or running."""

    def gap(self) -> float:
        """Between the most and the least served of the waiting keys, in weighted tokens."""

    def lead(self, key: FairnessKey) -> float:
        """How many weighted tokens more than the least served waiting key this key was served."""


class VirtualTokenCounters:
    """The least served key goes next: VTC of Sheng et al., "Fairness in Serving Large Language Models", OSDI
    2024.

    Each key has a counter of weighted tokens: (`INPUT_WEIGHT` * inputs + `OUTPUT_WEIGHT` * outputs) /
    `key.weight`. Inputs count at admission, outputs as they come. A key that begins to wait is lifted to the
    smallest counter of the waiting keys (or of the last one that waited), so that idle time earns no credit.
    While two keys both wait, the weighted service that they get differs by at most 2 * max(INPUT_WEIGHT *
    longest input, OUTPUT_WEIGHT * tokens in a batch), both divided by the smaller of their weights.

    Inputs from the prefix cache do not count, because they cost nothing; this only tightens the bound. The
    counter of a key without sequences is dropped once it is at or below the smallest waiting counter, because
    it would be lifted anyway.
    """

    def __init__(self) -> None:
        self._counters: dict[FairnessKey, float] = {}
        self._heads: dict[FairnessKey, int] = {}
        self._heap: list[tuple[float, int, FairnessKey]] = []  # may lag behind `_counters`, which only grow
        self._floor = 0.0  # the last known smallest waiting counter; it never falls
        self._last: FairnessKey | None = None  # the last key whose queue became empty
        self._gone: set[FairnessKey] = set()
        self._gone_heap: list[tuple[float, int, FairnessKey]] = []
        self._ties = count()

    def offer(self, key: FairnessKey, order: int) -> None:
        """Lifts the counter of a key that did not wait."""
        if key not in self._heads:
            self._gone.discard(key)
            if self._heads:
                self._first()  # brings the floor up to date
            elif self._last is not None:
                self._raise_floor(self._counters.get(self._last, self._floor))
            self._counters[key] = max(self._counters.get(key, 0.0), self._floor)
        self._heads[key] = order
        heappush(self._heap, (self._counters[key], order, key))
        if len(self._heap) > 2 * len(self._heads) + 64:  # cancelled heads leave stale entries
            self._heap = [(self._counters[k], first, k) for k, first in self._heads.items()]
            heapify(self._heap)

    def withdraw(self, key: FairnessKey) -> None:
        """The key no longer waits. Its counter stays."""
        del self._heads[key]
        self._last = key

    def choose(self, behind: Collection[str] = (), of: Collection[str] | None = None) -> FairnessKey:
        """The waiting key with the smallest counter; among equals the earliest arrival."""
        if of is not None:
            theirs = (key for key in self._heads if key.tenant in of)
            return min(theirs, key=lambda key: (self._counters[key], self._heads[key]))
        first = self._first()
        if first.tenant not in behind:
            return first
        # A key that has just arrived was lifted to this counter, without being served as much.
        equal = ((order, key) for key, order in self._heads.items() if key.tenant not in behind)
        smallest = self._counters[first]
        return min((each for each in equal if self._counters[each[1]] == smallest), default=(0, first))[1]

    def _first(self) -> FairnessKey:
        heap = self._heap
        while True:
            counter, order, key = heap[0]
            if self._heads.get(key) != order:
                heappop(heap)
            elif self._counters[key] != counter:
                heapreplace(heap, (self._counters[key], order, key))
            else:
                self._raise_floor(counter)
                return key

    def charge(self, key: FairnessKey, input_tokens: int, output_tokens: int) -> None:
        """Add to the key's counter."""
        cost = INPUT_WEIGHT * input_tokens + OUTPUT_WEIGHT * output_tokens
        self._counters[key] += cost / key.weight

    def forget(self, key: FairnessKey) -> None:
        """Keep the counter only while it is above the floor."""
        if key not in self._counters:
            return  # it has never waited
        self._gone.add(key)
        heappush(self._gone_heap, (self._counters[key], next(self._ties), key))
        self._raise_floor(self._floor)

    def gap(self) -> float:
        """See FairnessPolicy."""
        waiting = [self._counters[key] for key in self._heads]
        return max(waiting) - min(waiting) if waiting else 0.0

    def lead(self, key: FairnessKey) -> float:
        """See FairnessPolicy."""
        return self._counters[key] - self._counters[self._first()]

    def counters(self) -> dict[FairnessKey, float]:
        """A copy of the counters, for metrics and tests."""
        return dict(self._counters)

    def _raise_floor(self, floor: float) -> None:
        self._floor = max(self._floor, floor)
        while self._gone_heap and self._gone_heap[0][0] <= self._floor:
            _, _, key = heappop(self._gone_heap)
            if key in self._gone and self._counters[key] <= self._floor:
                self._gone.remove(key)
                del self._counters[key]
