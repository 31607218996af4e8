"""Limits the bytes of request bodies in memory: of each tenant, and of all.

A body counts from its announcement until its request is ready for the engine. A body for which there is no
room is refused before it is read.
"""

from collections import Counter
from contextlib import suppress

import anyio

from personae.api.tenants.limits import limits_of
from personae.api.tenants.store import Identity
from personae.errors import Overloaded, RateLimited
from personae.kernels.sizes import size_text

TOTAL = 256 * 2**20


class BodyBudget:
    """Belongs to one event loop."""

    def __init__(self, total: int = TOTAL) -> None:
        self.total = total
        self._held: Counter[str] = Counter()
        self._freed = anyio.Event()

    def hold(self, who: Identity) -> "Hold":
        """A hold of nothing yet."""
        return Hold(self, who)

    def held(self, tenant: str | None = None) -> int:
        """Bytes of a tenant's bodies, or of all."""
        return self._held.total() if tenant is None else self._held[tenant]

    def most(self, who: Identity) -> int:
        """What a tenant may hold at once."""
        most = limits_of(who).body_bytes
        return self.total if most is None else min(most, self.total)

    def take(self, who: Identity, size: int) -> None:
        """Take bytes. Raises RateLimited or Overloaded."""
        most = self.most(who)
        if self._held[who.tenant] + size > most:
            raise RateLimited(
                f"The bodies of this tenant's requests in progress have {size_text(self._held[who.tenant])}, "
                f"and may have {size_text(most)}; {size_text(size, needed=True)} more are too many. Wait for "
                "one to be taken in.",
                param="body",
            )
        if self.held() + size > self.total:
            raise Overloaded("The server is taking in too many large requests; try again shortly.")
        self._held[who.tenant] += size

    def give(self, tenant: str, size: int) -> None:
        """Return bytes."""
        self._held[tenant] -= size
        if not self._held[tenant]:
            del self._held[tenant]
        self._freed.set()

    async def freed(self) -> None:
        """Wait until bytes are returned."""
        if self._freed.is_set():
            self._freed = anyio.Event()
        await self._freed.wait()


class Hold:
    """The share of the budget that one request holds."""

    def __init__(self, budget: BodyBudget, who: Identity) -> None:
        self._budget = budget
        self._who = who
        self._size = 0

    def grow(self, size: int) -> None:
        """Hold at least so much in all. Raises RateLimited or Overloaded."""
        if size > self._size:
            self._budget.take(self._who, size - self._size)
            self._size = size

    async def wait(self, size: int) -> None:
        """Hold so much as soon as that leaves half of the tenant's budget, or nothing is held: for work that
        lets requests go first."""
        most = self._budget.most(self._who)
        size = min(size, most)
        while True:
            held = self._budget.held(self._who.tenant)
            if not held or held + size <= most / 2:
                with suppress(RateLimited, Overloaded):
                    return self.grow(size)
            await self._budget.freed()

    def shrink(self, size: int = 0) -> None:
        """Hold no more than this."""
        if size < self._size:
            self._budget.give(self._who.tenant, self._size - size)
            self._size = size
