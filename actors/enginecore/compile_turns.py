"""Whose grammar is compiled next: fair queues in front of the compiles.

A tenant has one compile at a time, and `MOST_QUICK` tenants have one at once. The next turn is that of the
tenant whose compiles have taken the least time so far. A compile that takes longer than `QUICK_SECONDS` gives
its turn back, as it runs on idle cores from then on; a tenant may have `MOST_LONG` of these as well.
"""

from collections import deque
from collections.abc import Callable

from personae.engine.scheduling.fairness import FairnessKey, VirtualTokenCounters

QUICK_SECONDS = 0.25
MOST_QUICK = 2
MOST_LONG = 3  # of a tenant


class Turn:
    """A compile's place in the queues. `begin` is called when it may begin."""

    def __init__(self, tenant: str, begin: Callable[[], None]) -> None:
        self.key = FairnessKey(tenant, None)
        self.begin = begin
        self.begun: float | None = None
        self.long = False


class CompileTurns:
    """Gives turns. Times are in seconds, of any clock."""

    def __init__(self) -> None:
        self._counters = VirtualTokenCounters()  # a microsecond counts as an input token
        self._waiting: dict[FairnessKey, deque[Turn]] = {}
        self._offered: set[FairnessKey] = set()
        self._quick: dict[FairnessKey, Turn] = {}
        self._long: dict[FairnessKey, int] = {}
        self._order = 0

    def wait(self, turn: Turn, now: float) -> None:
        """A compile waits for its turn."""
        self._waiting.setdefault(turn.key, deque()).append(turn)
        self._give(now)

    def lengthen(self, turn: Turn, now: float) -> None:
        """A compile has taken `QUICK_SECONDS`."""
        turn.long = True
        del self._quick[turn.key]
        self._long[turn.key] = self._long.get(turn.key, 0) + 1
        self._give(now)

    def leave(self, turn: Turn, now: float) -> None:
        """A compile has ended, or its turn is not wanted any more."""
        key = turn.key
        if turn.begun is None:
            if turn in (queue := self._waiting.get(key, deque())):
                queue.remove(turn)
        elif turn.long:
            self._long[key] -= 1
            if not self._long[key]:
                del self._long[key]
        else:
            del self._quick[key]
        if turn.begun is not None:
            self._counters.charge(key, round(1e6 * (now - turn.begun)), 0)
        self._give(now)
        if key not in self._waiting and key not in self._quick and key not in self._long:
            self._counters.forget(key)

    def _give(self, now: float) -> None:
        """Let compiles begin."""
        for key in [*self._waiting]:
            self._offer(key)
        while self._offered and len(self._quick) < MOST_QUICK:
            key = self._counters.choose()
            turn = self._waiting[key].popleft()
            turn.begun = now
            self._quick[key] = turn
            self._offer(key)
            turn.begin()

    def _offer(self, key: FairnessKey) -> None:
        """Have the key in the choice exactly if one of its compiles may begin."""
        if not self._waiting[key]:
            del self._waiting[key]
        can = key in self._waiting and key not in self._quick and self._long.get(key, 0) < MOST_LONG
        if can and key not in self._offered:
            self._order += 1
            self._offered.add(key)
            self._counters.offer(key, self._order)
        elif not can and key in self._offered:
            self._offered.remove(key)
            self._counters.withdraw(key)
