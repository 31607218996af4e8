"""Whose grammar is compiled next: fair queues in front of the compiles.

A tenant has one compile at a time, and `MOST_QUICK` tenants have one at once. The next turn is that of the
tenant whose compiles have taken the least time. A tenant that begins to wait counts as if it had been served
as much as the least served one that is here, so that idle time earns no credit. A compile that takes longer
than `QUICK_SECONDS` gives its turn back, as it runs on idle cores from then on; a tenant may have `MOST_LONG`
of these as well.
"""

from collections import deque
from collections.abc import Callable

QUICK_SECONDS = 0.25
MOST_QUICK = 2
MOST_LONG = 3  # of a tenant


class Turn:
    """A compile's place in the queues. `begin` is called when it may begin, which is at `begun`."""

    def __init__(self, tenant: str, begin: Callable[[], None]) -> None:
        self.tenant = tenant
        self.begin = begin
        self.begun: float | None = None


class _Tenant:
    """A tenant that has turns. `served`: seconds of its compiles that have ended."""

    def __init__(self, served: float) -> None:
        self.served = served
        self.waiting: deque[Turn] = deque()
        self.quick: Turn | None = None
        self.long: list[Turn] = []

    @property
    def may_begin(self) -> bool:
        return bool(self.waiting) and self.quick is None and len(self.long) < MOST_LONG


class CompileTurns:
    """Gives turns. Times are in seconds, of any clock."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}

    def wait(self, turn: Turn, now: float) -> None:
        """A compile waits for its turn."""
        if turn.tenant not in self._tenants:
            least = min((tenant.served for tenant in self._tenants.values()), default=0.0)
            self._tenants[turn.tenant] = _Tenant(least)
        self._tenants[turn.tenant].waiting.append(turn)
        self._give(now)

    def lengthen(self, turn: Turn, now: float) -> None:
        """A compile has taken `QUICK_SECONDS`. It may have ended in the same moment."""
        tenant = self._tenants.get(turn.tenant)
        if tenant is None or tenant.quick is not turn:
            return
        tenant.quick = None
        tenant.long.append(turn)
        self._give(now)

    def leave(self, turn: Turn, now: float) -> None:
        """A compile has ended, or its turn is not wanted any more."""
        tenant = self._tenants[turn.tenant]
        if turn.begun is None:
            tenant.waiting.remove(turn)
        else:
            tenant.served += now - turn.begun
            if tenant.quick is turn:
                tenant.quick = None
            else:
                tenant.long.remove(turn)
        if not (tenant.waiting or tenant.quick or tenant.long):
            del self._tenants[turn.tenant]
        self._give(now)

    def _give(self, now: float) -> None:
        """Let compiles begin."""
        while sum(tenant.quick is not None for tenant in self._tenants.values()) < MOST_QUICK:
            ready = [tenant for tenant in self._tenants.values() if tenant.may_begin]
            if not ready:
                return
            tenant = min(ready, key=lambda tenant: tenant.served)
            turn = tenant.quick = tenant.waiting.popleft()
            turn.begun = now
            turn.begin()
