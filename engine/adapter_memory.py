"""Adapters on the device of one engine: they come, are held, leave, and borrow memory of the KV cache."""

from collections.abc import Iterator

from personae.engine.device_event import DeviceToHostEvent
from personae.engine.runner import Runner
from personae.errors import Overloaded
from personae.lora.adapter import Adapter
from personae.lora.stored import Pieces

LOAN = 32  # KV pages that are lent at a time


class AdapterMemory:
    """The adapters of a runner's pool, and the KV pages whose memory they have."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._lent: list[int] = []

    def place(self, adapter: Adapter) -> bool:
        """Copy an adapter to the device and hold it there. False: no room now, held adapters fill it.

        Placing a held adapter again changes nothing. Raises AdapterError when it can never fit.
        """
        pool = self.runner.adapters
        try:
            if not pool.pins(adapter.digest):
                pool.load(adapter)
                pool.pin(adapter.digest)
        except Overloaded:
            return False
        return True

    def placing(self, adapter: Adapter) -> Pieces:
        """As `place`, a piece at a time: steps may run between the pieces, of other adapters.

        The first piece raises AdapterError, or Overloaded when there is no room now. If they end with
        something that is still done beside, the adapter is not to be used before that; if that fails, it is
        to be discarded.
        """
        pool = self.runner.adapters
        if pool.pins(adapter.digest):
            return None
        arriving = yield from pool.loading(adapter)
        pool.pin(adapter.digest)
        return arriving

    def discard(self, digest: str) -> None:
        """Undo `placing`."""
        self.runner.adapters.unpin(digest)
        self.runner.adapters.unload(digest)

    def short_of(self, adapter: Adapter) -> int:
        """The KV pages whose memory would let it in without another leaving, and some for who comes next:
        many neighbours are given back as fast as few. 0 if nothing can be lent."""
        return -(-self.runner.adapters.short_of(adapter) // (LOAN * self.runner.kv.page_bytes)) * LOAN

    def lending(self, pages: tuple[int, ...]) -> Iterator[None]:
        """Adapters may have the memory of these KV pages, whole runs, which no later step touches: after the
        last piece."""
        before = DeviceToHostEvent(self.runner.device)
        while not before.reached:
            yield
        yield from self.runner.kv.giving_back(pages)
        self._lent += pages
        self.runner.adapters.budget += len(pages) * self.runner.kv.page_bytes

    def repay(self, count: int) -> tuple[int, ...]:
        """Up to `count` of the pages that were lent, in whole runs, as far as adapters that nobody holds can
        leave. They may be used after the last piece of `giving_back`."""
        size, run = self.runner.kv.page_bytes, self.runner.layout.run
        count = min(-(-count // run) * run, len(self._lent))
        count = self.runner.adapters.free_up(count * size) // (run * size) * run
        pages = tuple(self._lent[len(self._lent) - count :])
        del self._lent[len(self._lent) - count :]
        self.runner.adapters.budget -= count * size
        return pages

    def giving_back(self, pages: tuple[int, ...]) -> Iterator[None]:
        """Let go of memory that adapters have left, for these pages, a piece at a time."""
        yield from self.runner.adapters.giving_back()
        yield from self.runner.kv.having_back(pages)

    @property
    def adapter_stats(self) -> tuple[int, int, int]:
        """Adapters on the device, how many were copied there, how many left for others."""
        pool = self.runner.adapters
        return len(pool.residents), pool.loads, pool.evictions

    def release(self, digest: str) -> None:
        """The adapter may be evicted; nothing if it is not held."""
        if self.runner.adapters.pins(digest):
            self.runner.adapters.unpin(digest)
