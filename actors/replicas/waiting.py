"""Holds the requests that wait for a replica: one queue per (tenant, adapter); the least served key goes
next."""

import math
from collections import Counter
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from msgspec.structs import replace

from personae.actors.frontend.live_stream import LiveStream
from personae.actors.replicas.prefixes import blocks_of
from personae.engine.scheduling.fairness import FairnessKey, FairnessPolicy
from personae.engine.scheduling.live import turn
from personae.engine.scheduling.page_names import block_names
from personae.engine.sequence import SequenceLog

LEAD = 1024.0  # how many weighted tokens a key may be ahead when its target goes first
MAX_SKIPPED = 32  # groups with a target that are skipped in a row


class Group:
    """Streams that go to one replica together: one stream, or the choices for one prompt with the leader
    first.

    `logs` are the logs to submit. `blocks` are the names of the prompt's blocks. `answer` is how many tokens
    each answer is likely to have. `order` is its number by arrival. `source` is the number of the replica
    that has just computed its prompt, if one did only that. `due` is the latest time to begin the prompt if
    the first token is to meet its target.
    """

    __slots__ = ("_names", "answer", "blocks", "due", "key", "logs", "order", "source", "streams")

    def __init__(
        self,
        streams: list[LiveStream],
        logs: list[SequenceLog],
        answer: int,
        source: int | None = None,
    ) -> None:
        log = logs[0]
        self.streams = streams
        self.logs = logs
        self.key = FairnessKey(log.tenant, log.adapter, log.background, log.weight)
        self.blocks = blocks_of(log)
        self.answer = answer
        self._names: tuple[int, ...] | None = None
        self.order = 0
        self.source = source
        self.due = math.inf

    def names(self, block_size: int) -> tuple[int, ...]:
        """The names that engines give to the prompt's blocks. All engines use the same block size."""
        if self._names is None:
            self._names = tuple(block_names(self.logs[0], block_size))
        return self._names

    @property
    def prompt(self) -> int:
        """How many tokens to compute before the first new one."""
        return len(self.logs[0].tokens)

    @property
    def work(self) -> int:
        """How many tokens to compute if nothing is cached."""
        return self.prompt + self.answer * len(self.logs)


class WaitingGroups:
    """Every group that waits. A parked key is skipped until `unpark`."""

    def __init__(self, policy: FairnessPolicy) -> None:
        self._policy = policy
        self._queues: dict[FairnessKey, list[tuple[int, int, Group]]] = {}
        self._group_of: dict[str, Group] = {}
        self._offered: set[FairnessKey] = set()
        self._parked: dict[FairnessKey, None] = {}
        self._arrivals = 0
        self._due: list[tuple[float, int, Group]] = []  # groups with a target; may hold groups that have left
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
        """Queue a group by its priority, behind the groups that came before."""
        group.order = self._arrivals
        self._arrivals += 1
        self._group_of.update((log.id, group) for log in group.logs)
        self.demand[group.key.adapter] += group.work
        self.prompts[group.key.tenant] += group.prompt
        if group.due < math.inf:
            heappush(self._due, (group.due, group.order, group))
            if len(self._due) > 2 * len(self._group_of) + 64:  # many entries are of groups that have left
                self._due = [entry for entry in self._due if self._waits(entry[2])]
                heapify(self._due)
        queue = self._queues.setdefault(group.key, [])
        heappush(queue, (turn(group.logs[0], group.order), group.order, group))
        if queue[0][2] is group and group.key not in self._parked:
            self._offer(group.key)

    def choose(self, now: float = 0.0) -> Group | None:
        """Return the group whose turn it is; None if every key that waits is parked.

        Groups whose target can still be met go first, the one with the least time left before the others. Its
        key may have been served at most `LEAD` weighted tokens more than the least served key.
        """
        if not self._offered:
            return None
        key = self._policy.choose()
        if self._due and not key.background and (group := self._most_urgent(now)) is not None:
            return group
        return self._queues[key][0][2]

    def _most_urgent(self, now: float) -> Group | None:
        due = self._due
        skipped: list[tuple[float, int, Group]] = []
        found: Group | None = None
        while due and found is None and len(skipped) < MAX_SKIPPED:
            at, _, group = due[0]
            if at < now or not self._waits(group):
                heappop(due)  # its target is missed, or it has left
                continue
            if group.key in self._offered and self._policy.lead(group.key) <= LEAD:
                found = group
            else:
                skipped.append(heappop(due))
        for entry in skipped:
            heappush(due, entry)
        return found

    def _waits(self, group: Group) -> bool:
        return self._group_of.get(group.logs[0].id) is group

    def park(self, key: FairnessKey) -> None:
        """Skip this key: no replica has room for it now."""
        self._withdraw(key)
        self._parked[key] = None

    def unpark(self) -> None:
        """Consider parked keys again: there may be room."""
        parked, self._parked = self._parked, {}
        for key in parked:
            self._offer(key)

    def take(self, group: Group) -> None:
        """Remove the group that was chosen."""
        self._remove(group)

    def drop(self, id: str) -> bool:
        """Remove a sequence that is not wanted any more. Returns whether it waited here. If it was its
        group's leader, the next one leads."""
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
    """Return the log as a follower of the sequence `after`, or of none."""
    return replace(log, after=after)
