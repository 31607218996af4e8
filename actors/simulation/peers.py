"""Simulated transfers of pages between engines: slow, cut, and from engines that die."""

from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any, Protocol

from personae.actors.simulation.loop import SimulationLoop
from personae.actors.simulation.machine import SimulatedDevice
from personae.actors.simulation.process import SimulatedProcess
from personae.actors.simulation.tier import STALL_SECONDS, SimulatedStaging
from personae.actors.simulation.trouble import Costs, Wrong
from personae.engine.plan import PageKey, PageOwner
from personae.engine.scheduling.scheduler import Scheduler
from personae.engine.tiers.tier import PageFetch, Tier, TierCounts

LONGEST_HOLD = 5.0  # seconds that an engine keeps pages for another


class PeerEngine(Protocol):
    """An engine whose pages others fetch: its current process, device and scheduler."""

    @property
    def process(self) -> SimulatedProcess | None:
        """None before its first start."""

    @property
    def device(self) -> SimulatedDevice | None:
        """None before its first start."""

    @property
    def scheduler(self) -> Scheduler | None:
        """None before its first start."""


class SimulatedPeers(SimulatedStaging):
    """Implements `engine.tiers.tier.Tier`, as `PeerTier` does, over other simulated engines and the tier
    `below`. Of the transfers, `fails` (a share) find nobody, stall, or are cut in the middle. The addresses
    of engines end with their numbers. `wrong` gets what must never happen."""

    def __init__(
        self,
        engines: Sequence[PeerEngine],
        below: Tier | None,
        fails: float,
        costs: Costs,
        loop: SimulationLoop,
        seed: int,
        wrong: Callable[[BaseException], None],
    ) -> None:
        super().__init__(fails, costs, seed)
        self._engines = engines
        self._below = below
        self._loop = loop
        self._wrong = wrong
        self._errors = 0

    @property
    def pages(self) -> int:
        """See TierIndex."""
        return 0 if self._below is None else self._below.pages

    @property
    def room(self) -> int:
        """See TierIndex."""
        return 0 if self._below is None else self._below.room

    @property
    def stores(self) -> bool:
        """See TierIndex."""
        return self._below is not None

    def has(self, name: bytes, source: str | None = None) -> bool:
        """See TierIndex."""
        return source is not None or (self._below is not None and self._below.has(name))

    def wants(self, name: bytes) -> bool:
        """See TierIndex."""
        return self._below is not None and self._below.wants(name)

    def seconds(self, pages: int) -> float | None:
        """See TierIndex."""
        own = self._costs.connect + pages * self._costs.transfer
        if self._below is None:
            return own
        theirs = self._below.seconds(pages)
        return None if theirs is None else max(own, theirs)

    @property
    def pending(self) -> int:
        """See Tier."""
        return 0 if self._below is None else self._below.pending

    def counts(self) -> TierCounts:
        """See TierIndex."""
        errors, self._errors = self._errors, 0
        stored, others = TierCounts() if self._below is None else self._below.counts()
        return TierCounts(stored, errors + others)

    def store(self, keys: Sequence[PageKey], owners: Sequence[PageOwner], ready: Callable[[], Any]) -> None:
        """See Tier."""
        assert self._below is not None
        self._below.store(keys, owners, ready)

    def forget(self, tenant: bytes, session: bytes) -> None:
        """See Tier."""
        if self._below is not None:
            self._below.forget(tenant, session)

    def fetch(self, fetch: PageFetch) -> int:
        """See Tier."""
        if fetch.ticket not in self._tickets:
            return 0
        found = [] if fetch.source is None else self._from_peer(fetch, fetch.source)
        self.fetched += len(found)
        left = fetch.keys[len(found) :]
        if left and self._below is not None:
            ticket = self._below.reserve(len(left))
            count = self._below.fetch(fetch._replace(ticket=ticket, keys=left))
            found += list(self._below.take(ticket))[:count]
            self._below.discard(ticket)
        self._tickets[fetch.ticket] = found
        return len(found)

    def _from_peer(self, fetch: PageFetch, source: str) -> list[Any]:
        fault = self._dice.choice(("gone", "stalls", "cut")) if self._strikes() else ""
        sleep = self._loop.threads.sleep
        sleep(self._costs.connect)
        if fault == "stalls":
            sleep(STALL_SECONDS)
        engine = self._engines[int(PurePath(source).name)]
        process, scheduler, device = engine.process, engine.scheduler, engine.device
        running = process is not None and process.returncode is None and process.core is not None
        if (
            not running
            or process is None
            or scheduler is None
            or device is None
            or fault in ("gone", "stalls")
        ):
            self._errors += 1
            return []
        path = (*fetch.before, *fetch.keys)
        held = scheduler.hold(path[0].parent, [key.tokens for key in path])
        wanted = held.pages[len(fetch.before) :]
        cells = [device.content(page) for page in wanted]
        seconds = len(wanted) * self._costs.transfer
        sleep(seconds)

        def sent() -> None:
            if process.returncode is None and engine.scheduler is scheduler:
                if [device.content(page) for page in wanted] != cells:
                    self._wrong(Wrong("pages changed while they were sent to another engine"))
                scheduler.let_go(held.number)

        self._loop.call_later(min(self._costs.connect + seconds, LONGEST_HOLD), sent)
        if fault == "cut" and wanted:
            self._errors += 1
            return cells[: self._dice.randrange(len(cells))]
        return cells

    def forget_fetches(self) -> None:
        """See Tier."""
        super().forget_fetches()
        if self._below is not None:
            self._below.forget_fetches()
