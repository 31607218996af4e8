"""Where requests wait for a replica: one queue per (tenant, adapter), the least served goes next."""

import math
from collections import Counter
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from msgspec.structs import replace

from personae.actors.frontend.live_stream import LiveStream
from personae.actors.replicas.prefixes import blocks_of
from personae.engine.scheduling.fairness import FairnessKey, FairnessPolicy
from personae.engine.scheduling.kv_events import block_names
from personae.engine.scheduling.live import turn
from personae.engine.sequence import SequenceLog

LEAD = 1024.0  # weighted tokens that a target may bring forward
LOOKED_AT = 32  # groups with a target that are passed over in a row


class Group:
    """Streams that go to one replica together: one, or the choices for one prompt, its leader first.

    `logs` are what is submitted. `blocks` name the blocks of the prompt, `answer` is how many tokens each
    answer is likely to have. `order` counts arrivals. `due` is when its prompt has to be begun at the latest
    for its first token to come when the client wants it.
    """

    __slots__ = ("_names", "answer", "blocks", "due", "key", "logs", "order", "streams")

    def __init__(self, streams: list[LiveStream], logs: list[SequenceLog], answer: int) -> None:
        log = logs[0]
        self.streams = streams
        self.logs = logs
        self.key = FairnessKey(log.tenant, log.adapter, log.background, log.weight)
        self.blocks = blocks_of(log)
        self.answer = answer
        self._names: tuple[int, ...] | None = None
        self.order = 0
        self.due = math.inf

    def names(self, block_size: int) -> tuple[int, ...]:
        """The names that engines give to the prompt's blocks. All engines have blocks of one size."""
        if self._names is None:
            self._names = tuple(block_names(self.logs[0], block_size))
        return self._names

    @property
    def prompt(self) -> int:
        """Tokens to be computed before the first that is new."""
        return len(self.logs[0].tokens)

    @property
    def work(self) -> int:
        """Tokens to be computed, if nothing is cached."""
        return self.prompt + self.answer * len(self.logs)


class WaitingGroups:
    """Every group that waits. A key that is `parked` is passed over until `unpark`."""

    def __init__(self, policy: FairnessPolicy) -> None:
        self._policy = policy
        self._queues: dict[FairnessKey, list[tuple[int, int, Group]]] = {}
        self._group_of: dict[str, Group] = {}
        self._offered: set[FairnessKey] = set()
        self._parked: dict[FairnessKey, None] = {}
        self._arrivals = 0
        self._due: list[tuple[float, int, Group]] = []  # of those with a target; may lag behind
        self.demand: Counter[str | None] = Counter()  # work that waits, by adapter
        self.prompts: Counter[str] = Counter()  # tokens of prompts that wait, by tenant

    def __len__(self) -> int:
        return len(self._group_of)

    def __iter__(self) -> Iterator[SequenceLog]:
        for id, group in self._group_of.items():
            yield next(log for log in group.logs if log.id == id)

    @property
    def keys(self) -> int:
        """How many keys may be chosen."""
        return len(self._offered)

    def push(self, group: Group) -> None:
        """It waits by its priority, and behind those that came before."""
        group.order = self._arrivals
        self._arrivals += 1
        self._group_of.update((log.id, group) for log in group.logs)
        self.demand[group.key.adapter] += group.work
        self.prompts[group.key.tenant] += group.prompt
        if group.due < math.inf:
            heappush(self._due, (group.due, group.order, group))
            if len(self._due) > 2 * len(self._group_of) + 64:  # those that are gone leave their entries
                self._due = [entry for entry in self._due if self._waits(entry[2])]
                heapify(self._due)
        queue = self._queues.setdefault(group.key, [])
        heappush(queue, (turn(group.logs[0], group.order), group.order, group))
        if queue[0][2] is group and group.key not in self._parked:
            self._offer(group.key)

    def choose(self, now: float = 0.0) -> Group | None:
        """Whose turn it is; None if nobody waits that is not parked.

        Of those with a target that can still be met the one with the least time left goes first, as long as
        its key was served no more than `LEAD` weighted tokens more than the least served one.
        """
        if not self._offered:
            return None
        key = self._policy.choose()
        if self._due and not key.background and (group := self._most_urgent(now)) is not None:
            return group
        return self._queues[key][0][2]

    def _most_urgent(self, now: float) -> Group | None:
        due = self._due
        passed: list[tuple[float, int, Group]] = []
        found: Group | None = None
        while due and found is None and len(passed) < LOOKED_AT:
            at, _, group = due[0]
            if at < now or not self._waits(group):
                heappop(due)  # it is too late for it, or it has gone
                continue
            if group.key in self._offered and self._policy.lead(group.key) <= LEAD:
                found = group
            else:
                passed.append(heappop(due))
        for entry in passed:
            heappush(due, entry)
        return found

    def _waits(self, group: Group) -> bool:
        return self._group_of.get(group.logs[0].id) is group

    def park(self, key: FairnessKey) -> None:
        """There is no room for this key now."""
        self._withdraw(key)
        self._parked[key] = None

    def unpark(self) -> None:
        """There may be room again."""
        parked, self._parked = self._parked, {}
        for key in parked:
            self._offer(key)

    def take(self, group: Group) -> None:
        """The group that was chosen goes."""
        self._remove(group)

    def drop(self, id: str) -> bool:
        """A sequence is not wanted any more; whether it waited here. Those that would have followed it follow
        nobody."""
        group = self._group_of.pop(id, None)
        if group is None:
            return False
        at = next(at for at, log in enumerate(group.logs) if log.id == id)
        if len(group.logs) == 1:
            self._group_of[id] = group
            self._remove(group)
            return True
        self.demand[group.key.adapter] -= group.work
        del group.logs[at], group.streams[at]
        if at == 0:
            first = group.logs[0].id
            group.logs = [follow(log, None if index == 0 else first) for index, log in enumerate(group.logs)]
        self.demand[group.key.adapter] += group.work
        return True

    def _remove(self, group: Group) -> None:
        key, queue = group.key, self._queues[group.key]
        for log in group.logs:
            del self._group_of[log.id]
        self.demand[key.adapter] -= group.work
        if not self.demand[key.adapter]:
            del self.demand[key.adapter]
        self.prompts[key.tenant] -= group.prompt
        if not self.prompts[key.tenant]:
            del self.prompts[key.tenant]
        first = queue[0][2] is group
        if first:
            heappop(queue)
        else:
            queue[:] = [entry for entry in queue if entry[2] is not group]
            queue.sort()
        if not queue:
            del self._queues[key]
            self._parked.pop(key, None)
            if key in self._offered:
                self._withdraw(key)
        elif first and key in self._offered:
            self._offer(key)

    def _withdraw(self, key: FairnessKey) -> None:
        self._offered.remove(key)
        self._policy.withdraw(key)

    def _offer(self, key: FairnessKey) -> None:
        self._offered.add(key)
        self._policy.offer(key, self._queues[key][0][1])


def follow(log: SequenceLog, after: str | None) -> SequenceLog:
    """The log of a sequence that shares the prompt of another, or of none."""
    return replace(log, after=after)
