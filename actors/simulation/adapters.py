"""Simulated adapters: a disk and device memory for them, which take virtual time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from personae.actors.simulation.loop import SimulationThreads
from personae.actors.simulation.trouble import Costs, Trouble, Wrong
from personae.engine.plan import MemoryLayout
from personae.errors import Overloaded
from personae.lora.source import AdapterSource
from personae.lora.stored import Pieces

ADAPTER_PAGES = 3  # KV pages whose memory one adapter needs


class SimulatedAdapters:
    """Implements `actors.spec.AdapterProvider`: every digest is an adapter. The first read of each takes
    time."""

    def __init__(self, costs: Costs, threads: SimulationThreads, trouble: Trouble, keep: int) -> None:
        self._costs = costs
        self._threads = threads
        self._trouble = trouble
        self._keep = keep
        self._host: dict[str, None] = {}

    @property
    def kept(self) -> tuple[int, int]:
        """Adapters on the host, and their bytes."""
        return len(self._host), len(self._host)

    def find(self, digest: str) -> AdapterSource | None:
        """Return the adapter's source if it is on the host."""
        return source_of(digest) if digest in self._host else None

    def read(self, digest: str) -> AdapterSource:
        """Read from a slow disk and keep the adapter. The oldest ones are evicted."""
        self._threads.sleep(self._trouble.slowed(self._costs.read))
        self._trouble.reads(digest)
        self._host[digest] = None
        while len(self._host) > self._keep:
            del self._host[next(iter(self._host))]
        return source_of(digest)

    def placed(self, digest: str) -> None:
        """Drop the copy on the host."""
        self._host.pop(digest, None)

    def forget_offered(self) -> None:
        """Do nothing: no source is held."""


def source_of(digest: str) -> AdapterSource:
    """The source of this adapter."""
    return AdapterSource((digest,))


@dataclass(frozen=True, slots=True)
class SimulatedTicket:
    """Implements `AdapterTicket`."""

    memory: "SimulatedAdapterMemory"
    digest: str

    @property
    def missing(self) -> int:
        """How many more pages the adapter needs."""
        return self.memory.short_of(self.digest)

    def pieces(self) -> Pieces:
        """Load in two pieces. The first raises Overloaded if held adapters fill the device."""
        return self.memory.placing(self.digest)


class SimulatedAdapterMemory:
    """Implements `engine.worker.AdapterMemory` without tensors: room for `capacity` adapters, and one more
    for every `ADAPTER_PAGES` in `lent`. `overwrite` is called with each page that is lent."""

    def __init__(
        self,
        layout: MemoryLayout,
        capacity: int,
        costs: Costs,
        threads: SimulationThreads,
        overwrite: Callable[[int], None],
    ) -> None:
        self.held: set[str] = set()
        self.lent: list[int] = []
        self._lends = bool(layout.lendable)
        self._capacity = capacity
        self._costs = costs
        self._threads = threads
        self._overwrite = overwrite
        self._resident: dict[str, None] = {}  # least recently loaded first
        self._copied = 0

    @property
    def adapter_stats(self) -> tuple[int, int, int]:
        """Adapters on the device, copies to it so far, evictions so far."""
        return len(self._resident), self._copied, self._copied - len(self._resident)

    def load_adapter(self, digest: str, source: AdapterSource) -> SimulatedTicket:
        """Start to load an adapter. The source must be the right one."""
        if source != source_of(digest):
            raise Wrong(f"adapter {digest} is to be loaded from {source}")
        return SimulatedTicket(self, digest)

    def placing(self, digest: str) -> Pieces:
        """See SimulatedTicket."""
        if digest not in self.held:
            if digest not in self._resident:
                while len(self._resident) >= self._places and self._evict():
                    pass
                if len(self._resident) >= self._places:
                    raise Overloaded("no room for another adapter")
                self._resident[digest] = None
                self._copied += 1
                self.held.add(digest)
                self._threads.sleep(self._costs.place / 2)
                yield
                self._threads.sleep(self._costs.place / 2)
            self.held.add(digest)
            self._resident[digest] = self._resident.pop(digest)
        return None

    def discard(self, digest: str) -> None:
        """Fail: nothing is read in the background, so nothing can need this."""
        raise AssertionError(f"{digest} was loaded when its pieces ended")

    def release(self, digest: str) -> None:
        """Allow this adapter to be evicted."""
        self.held.discard(digest)

    @property
    def _places(self) -> int:
        return self._capacity + len(self.lent) // ADAPTER_PAGES

    def _evict(self) -> bool:
        """Evict the least recently loaded adapter that nobody holds. Returns False if there is none."""
        victim = next((name for name in self._resident if name not in self.held), None)
        if victim is not None:
            del self._resident[victim]
        return victim is not None

    def short_of(self, digest: str) -> int:
        """See SimulatedTicket."""
        full = self._lends and len(self._resident) >= self._places
        return ADAPTER_PAGES if full and digest not in self._resident else 0

    def lending(self, pages: tuple[int, ...]) -> Iterator[None]:
        """Overwrite the lent pages, one after the other."""
        for page in pages:
            if page in self.lent:
                raise Wrong(f"page {page} is lent twice")
            self._overwrite(page)
            yield
        self.lent += pages

    def recall(self, count: int) -> tuple[int, ...]:
        """Return as many pages as adapters do not need."""
        while (free := self._unused()) < min(count, len(self.lent)) and self._evict():
            pass
        pages = tuple(self.lent[: min(free, count)])
        del self.lent[: len(pages)]
        return pages

    def returning(self, pages: tuple[int, ...]) -> Iterator[None]:
        """Return pages in one piece."""
        yield

    def _unused(self) -> int:
        beyond = max(len(self._resident) - self._capacity, 0)
        return len(self.lent) - beyond * ADAPTER_PAGES
