"""The policy that the server's own is compared with."""

from bisect import bisect_left, insort
from collections.abc import Collection

from personae.engine.scheduling.fairness import FairnessKey


class FirstComeFirstServed:
    """A FairnessPolicy that ignores tenants: only the order of arrival counts."""

    def __init__(self) -> None:
        self._queue: list[tuple[int, FairnessKey]] = []
        self._orders: dict[FairnessKey, int] = {}

    def offer(self, key: FairnessKey, order: int) -> None:
        """Queue the key by its first sequence."""
        if key in self._orders:
            self.withdraw(key)
        self._orders[key] = order
        insort(self._queue, (order, key))

    def withdraw(self, key: FairnessKey) -> None:
        """Take the key out of the queue."""
        del self._queue[bisect_left(self._queue, self._orders.pop(key), key=lambda entry: entry[0])]

    def choose(self, behind: Collection[str] = (), of: Collection[str] | None = None) -> FairnessKey:
        """The key of the sequence that came first."""
        return self._queue[0][1]

    def charge(self, key: FairnessKey, input_tokens: int, output_tokens: int) -> None:
        """Service does not count here."""

    def forget(self, key: FairnessKey) -> None:
        """A key that does not wait leaves no state."""

    def gap(self) -> float:
        """Service is not counted."""
        return 0.0

    def lead(self, key: FairnessKey) -> float:
        """Service is not counted."""
        return 0.0
