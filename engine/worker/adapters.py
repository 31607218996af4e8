"""The adapters of one device: loading, pinning, evicting, and borrowing memory from the KV cache."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from personae.engine.device_event import DeviceToHostEvent
from personae.engine.kv import KVCache
from personae.engine.plan import MemoryLayout
from personae.errors import Overloaded
from personae.lora.adapter import Adapter
from personae.lora.pool import LoraPool
from personae.lora.source import AdapterSource
from personae.lora.stored import Pieces

LOAN = 32  # the KV cache lends its pages in multiples of this number

ReadAdapter = Callable[[str, AdapterSource], Adapter]
"""Reads the adapter of a digest into host memory, as far as the device needs it. Raises AdapterError."""


class DeviceAdapters:
    """The adapters of one pool, and the KV pages whose memory the pool has borrowed; see `AdapterMemory`."""

    def __init__(
        self, adapters: LoraPool, kv: KVCache, layout: MemoryLayout, read_adapter: ReadAdapter
    ) -> None:
        self.adapters, self.kv, self.layout = adapters, kv, layout
        self._read_adapter = read_adapter
        self._lent: list[int] = []

    def load_adapter(self, digest: str, source: AdapterSource) -> "Ticket":
        """See AdapterMemory."""
        return Ticket(self, self._read_adapter(digest, source))

    def place(self, adapter: Adapter) -> bool:
        """Copy an adapter to the device and pin it there, at once. False if pinned adapters leave no room for
        it."""
        try:
            if not self.adapters.pins(adapter.digest):
                self.adapters.load(adapter)
                self.adapters.pin(adapter.digest)
        except Overloaded:
            return False
        return True

    def placing(self, adapter: Adapter) -> Pieces:
        """See `AdapterTicket.pieces`."""
        if self.adapters.pins(adapter.digest):
            return None
        arriving = yield from self.adapters.loading(adapter)
        self.adapters.pin(adapter.digest)
        return arriving

    def discard(self, digest: str) -> None:
        """See AdapterMemory."""
        self.adapters.unpin(digest)
        self.adapters.unload(digest)

    def short_of(self, adapter: Adapter) -> int:
        """See `AdapterTicket.missing`. It is rounded up, which leaves room for the next adapter: returning
        many neighbouring pages takes no longer than returning a few."""
        short = self.adapters.short_of(adapter)
        return -(-short // (LOAN * self.kv.page_bytes)) * LOAN if short else 0  # a rank may have no pages

    def lending(self, pages: tuple[int, ...]) -> Iterator[None]:
        """See AdapterMemory."""
        before = DeviceToHostEvent(self.kv.device)
        while not before.reached:
            yield
        yield from self.kv.unmapping(pages)
        self._lent += pages
        self.adapters.budget += len(pages) * self.kv.page_bytes

    def recall(self, count: int) -> tuple[int, ...]:
        """See AdapterMemory."""
        if not self._lent:
            return ()
        size, run = self.kv.page_bytes, self.layout.run
        count = min(-(-count // run) * run, len(self._lent))
        count = self.adapters.evict(count * size) // (run * size) * run
        pages = tuple(self._lent[len(self._lent) - count :])
        del self._lent[len(self._lent) - count :]
        self.adapters.budget -= count * size
        return pages

    def returning(self, pages: tuple[int, ...]) -> Iterator[None]:
        """See AdapterMemory."""
        yield from self.adapters.unmapping()
        yield from self.kv.mapping(pages)

    @property
    def adapter_stats(self) -> tuple[int, int, int]:
        """See AdapterMemory."""
        return len(self.adapters.residents), self.adapters.loads, self.adapters.evictions

    def release(self, digest: str) -> None:
        """See AdapterMemory."""
        if self.adapters.pins(digest):
            self.adapters.unpin(digest)


@dataclass(frozen=True, slots=True)
class Ticket:
    """An AdapterTicket for one device."""

    memory: DeviceAdapters
    adapter: Adapter

    @property
    def digest(self) -> str:
        """The adapter's digest."""
        return self.adapter.digest

    @property
    def missing(self) -> int:
        """See AdapterTicket."""
        return self.memory.short_of(self.adapter)

    def pieces(self) -> Pieces:
        """See AdapterTicket."""
        return self.memory.placing(self.adapter)
