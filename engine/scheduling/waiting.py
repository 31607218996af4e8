"""The queues of sequences that wait for a slot: one per (tenant, adapter), by priority and order of
arrival."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator
from operator import attrgetter

from personae.engine.scheduling.fairness import FairnessKey, FairnessPolicy
from personae.engine.scheduling.live import LiveSequence

_by_turn = attrgetter("turn", "order")


class WaitingQueue:
    """Every sequence here may be admitted at once. `policy` decides whose turn it is.

    A preempted sequence keeps its turn, so it returns to its old position in its queue. `tokens`: of the
    waiting sequences of each tenant, without background ones.
    """

    __slots__ = ("_queues", "background", "foreground", "policy", "tokens")

    def __init__(self, policy: FairnessPolicy) -> None:
        self.policy = policy
        self._queues: dict[FairnessKey, list[LiveSequence]] = {}
        self.foreground = 0  # the number of sequences that are not background
        self.background = 0
        self.tokens = Counter[str]()

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __iter__(self) -> Iterator[LiveSequence]:
        for queue in self._queues.values():
            yield from queue

    @property
    def keys(self) -> Collection[FairnessKey]:
        """The keys that have a queue."""
        return self._queues.keys()

    @property
    def tenants(self) -> set[str]:
        """The tenants of the sequences that are not background."""
        return {key.tenant for key in self._queues if not key.background}

    def push(self, sequence: LiveSequence) -> None:
        """Queue the sequence by its turn."""
        queue = self._queues.setdefault(sequence.key, [])
        insort(queue, sequence, key=_by_turn)
        self._count(sequence, 1)
        if queue[0] is sequence:
            self.policy.offer(sequence.key, sequence.order)

    def peek(self, behind: Collection[str] = (), of: Collection[str] | None = None) -> LiveSequence | None:
        """The sequence whose turn it is; None if none waits. `behind` and `of`: see FairnessPolicy."""
        if not self._queues or (of is not None and self.tenants.isdisjoint(of)):
            return None
        return self._queues[self.policy.choose(behind, of)][0]

    def remove(self, sequence: LiveSequence) -> None:
        """Remove the sequence from anywhere in its queue."""
        queue = self._queues[sequence.key]
        index = bisect_left(queue, _by_turn(sequence), key=_by_turn)
        assert queue[index] is sequence, f"sequence {sequence.id} is not in its queue"
        del queue[index]
        self._count(sequence, -1)
        if not queue:
            del self._queues[sequence.key]
            self.policy.withdraw(sequence.key)
        elif index == 0:
            self.policy.offer(sequence.key, queue[0].order)

    def _count(self, sequence: LiveSequence, change: int) -> None:
        if sequence.background:
            self.background += change
            return
        self.foreground += change
        tenant = sequence.key.tenant
        self.tokens[tenant] += change * len(sequence.tokens)
        if not self.tokens[tenant]:
            del self.tokens[tenant]
