"""Who goes next among those who wait.

The scheduler keeps one queue per key, a key being (tenant, adapter), in order of arrival. A policy ranks
the keys and nothing else; within a key, priority and order of arrival hold.
"""

from collections.abc import Callable, Collection
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import NamedTuple, Protocol


class FairnessKey(NamedTuple):
    """Tenant, adapter digest (None: the base model), whether its sequences give way to others, and the
    tenant's weight: with twice the weight it gets twice the service."""

    tenant: str
    adapter: str | None
    background: bool = False
    weight: float = 1.0


class FairnessPolicy(Protocol):
    """Chooses among keys that have something waiting. One instance serves one scheduler."""

    def offer(self, key: FairnessKey, order: int) -> None:
        """The sequence that arrived as number `order` is now the first that waits under `key`."""

    def withdraw(self, key: FairnessKey) -> None:
        """Nothing waits under `key` any more."""

    def choose(self, behind: Collection[str] = ()) -> FairnessKey:
        """The key whose first sequence goes next. At least one key is on offer. Of keys that are alike the
        policy takes those of tenants in `behind` last."""

    def charge(self, key: FairnessKey, input_tokens: int, output_tokens: int) -> None:
        """`key` was served this much."""

    def forget(self, key: FairnessKey) -> None:
        """No sequence of `key` is left, waiting or running."""

    def gap(self) -> float:
        """Between the most and the least served of the keys that wait, in weighted tokens."""

    def lead(self, key: FairnessKey) -> float:
        """By how many weighted tokens a key that waits was served more than the least served one."""


class VirtualTokenCounters:
    """The least served key goes next: VTC of Sheng et al., "Fairness in Serving Large Language Models",
    OSDI 2024.

    Each key has a counter of weighted tokens: (`input_weight` * inputs + `output_weight` * outputs) /
    `weight(key)`. Inputs count at admission, outputs as they come. A key that begins to wait is lifted to
    the smallest counter of those that wait (or that of the last one that waited), so that idleness earns no
    credit. While two keys both wait, the weighted service that they get differs by at most 2 *
    max(input_weight * longest input, output_weight * tokens in a batch), both divided by the smaller of
    their weights.

    Inputs count without those that the prefix cache had, which cost nothing; so the bound holds all the
    more. Counters at or below the smallest waiting one would be lifted anyway: those of keys that are gone
    are dropped.
    """

    def __init__(
        self,
        input_weight: float = 1.0,
        output_weight: float = 2.0,
        weight: Callable[[FairnessKey], float] = lambda key: key.weight,
    ) -> None:
        self._input_weight = input_weight
        self._output_weight = output_weight
        self._weight = weight
        self._counters: dict[FairnessKey, float] = {}
        self._heads: dict[FairnessKey, int] = {}
        self._heap: list[tuple[float, int, FairnessKey]] = []  # may lag behind `_counters`, which only grow
        self._floor = 0.0  # the smallest waiting counter seen last; it never falls
        self._last: FairnessKey | None = None  # the key that last ceased to wait
        self._gone: set[FairnessKey] = set()
        self._gone_heap: list[tuple[float, int, FairnessKey]] = []
        self._ties = count()

    def offer(self, key: FairnessKey, order: int) -> None:
        """A key that did not wait is lifted."""
        if key not in self._heads:
            self._gone.discard(key)
            if self._heads:
                self._first()  # brings the floor up to date
            elif self._last is not None:
                self._raise_floor(self._counters.get(self._last, self._floor))
            self._counters[key] = max(self._counters.get(key, 0.0), self._floor)
        self._heads[key] = order
        heappush(self._heap, (self._counters[key], order, key))
        if (
            len(self._heap) > 2 * len(self._heads) + 64
        ):  # heads that were cancelled leave their entries behind
            self._heap = [(self._counters[k], first, k) for k, first in self._heads.items()]
            heapify(self._heap)

    def withdraw(self, key: FairnessKey) -> None:
        """The key no longer waits; its counter stays."""
        del self._heads[key]
        self._last = key

    def choose(self, behind: Collection[str] = ()) -> FairnessKey:
        """The waiting key with the smallest counter, the earliest arrival among equals."""
        first = self._first()
        if first.tenant not in behind:
            return first
        # Whoever has just come was lifted to this counter; it was not served as much.
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
        cost = self._input_weight * input_tokens + self._output_weight * output_tokens
        self._counters[key] += cost / self._weight(key)

    def forget(self, key: FairnessKey) -> None:
        """Remember the counter only as long as it says more than the floor does."""
        if key not in self._counters:
            return  # it never got as far as waiting
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
        """The counters now, for metrics and tests."""
        return dict(self._counters)

    def _raise_floor(self, floor: float) -> None:
        self._floor = max(self._floor, floor)
        while self._gone_heap and self._gone_heap[0][0] <= self._floor:
            _, _, key = heappop(self._gone_heap)
            if key in self._gone and self._counters[key] <= self._floor:
                self._gone.remove(key)
                del self._counters[key]
