"""The simulated disk or object store: keeps the cells of pages across the deaths of engine cores, slowly and
unreliably."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from personae.actors.simulation.loop import SimulationThreads
from personae.actors.simulation.trouble import Costs
from personae.engine.plan import PageKey, PageOwner
from personae.engine.tiers.page_index import PageIndex
from personae.engine.tiers.tier import PageFetch, TierCounts

Cells = PageIndex[tuple[PageKey, Any]]
STALL_SECONDS = 20.0


class SimulatedStaging:
    """The part of a simulated tier that holds what fetches brought, and that decides what fails: `fails` (a
    share) of its operations."""

    def __init__(self, fails: float, costs: Costs, seed: int) -> None:
        self.fetched = 0
        self._fails = fails
        self._costs = costs
        self._dice = random.Random(seed)
        self._tickets: dict[int, list[Any]] = {}
        self._next_ticket = 0

    def reserve(self, pages: int) -> int:
        """See TierIndex."""
        self._next_ticket += 1
        self._tickets[self._next_ticket] = []
        return self._next_ticket

    def discard(self, ticket: int) -> None:
        """See TierIndex."""
        self._tickets.pop(ticket, None)

    def take(self, ticket: int) -> Any:
        """See Tier."""
        return self._tickets[ticket]

    def forget_fetches(self) -> None:
        """See Tier."""
        self._tickets.clear()

    @property
    def tickets(self) -> int:
        """How many fetches are held."""
        return len(self._tickets)

    def close(self) -> None:
        """See Tier."""

    def _strikes(self) -> bool:
        return self._fails > 0 and self._dice.random() < self._fails


class SimulatedTier(SimulatedStaging):
    """Implements `engine.tiers.tier.Tier`, with at most `bound` pages in `cells`, which engines may share as
    they share an object store. Of its operations, `fails` (a share) go wrong: a page is not stored, is lost,
    or is fetched only after `STALL_SECONDS`."""

    def __init__(
        self,
        bound: int,
        fails: float,
        costs: Costs,
        threads: SimulationThreads,
        seed: int,
        cells: Cells | None = None,
    ) -> None:
        super().__init__(fails, costs, seed)
        self._bound = bound
        self._threads = threads
        self._cells: Cells = PageIndex() if cells is None else cells
        self._counts = TierCounts()

    @property
    def pages(self) -> int:
        """See TierIndex."""
        return len(self._cells)

    @property
    def room(self) -> int:
        """See TierIndex."""
        return 0 if self._strikes() else 8

    @property
    def stores(self) -> bool:
        """See TierIndex."""
        return True

    def has(self, name: bytes, source: str | None = None) -> bool:
        """See TierIndex."""
        return name in self._cells

    def wants(self, name: bytes) -> bool:
        """See TierIndex."""
        return name not in self._cells

    def seconds(self, pages: int) -> float | None:
        """See TierIndex."""
        return None if self._strikes() else pages * self._costs.fetch

    @property
    def pending(self) -> int:
        """See Tier."""
        return 0

    def counts(self) -> TierCounts:
        """See TierIndex."""
        counts, self._counts = self._counts, TierCounts()
        return counts

    def store(self, keys: Sequence[PageKey], owners: Sequence[PageOwner], ready: Callable[[], Any]) -> None:
        """See Tier."""
        for key, owner, cells in zip(keys, owners, ready(), strict=True):
            if self._strikes():
                continue
            if len(self._cells) >= self._bound and key.name not in self._cells:
                self._cells.pop(owner)
            self._cells.add(key.name, (key, cells), owner)
            self._counts = self._counts._replace(stored=self._counts.stored + 1)

    def forget(self, tenant: bytes, session: bytes) -> None:
        """See Tier."""
        self._cells.remove_session(tenant, session)

    def fetch(self, fetch: PageFetch) -> int:
        """See Tier."""
        ticket, keys = fetch.ticket, fetch.keys
        if ticket not in self._tickets:
            return 0
        if self._strikes():
            self._threads.sleep(STALL_SECONDS)
        found: list[Any] = []
        for key in keys:
            self._threads.sleep(self._costs.fetch)
            if self._strikes():
                self._cells.remove(key.name)
                self._counts = self._counts._replace(errors=self._counts.errors + 1)
            kept = self._cells.get(key.name)
            if kept is None or kept[0] != key:
                break
            self._cells.use(key.name)
            found.append(kept[1])
        self._tickets[ticket] = found
        self.fetched += len(found)
        return len(found)
