"""The tier in host memory behind a GPU: pages that no longer fit into its memory, also those of preempted
sequences.

The memory is allocated at once, and pinned, so that a GPU copies at full speed. On a CPU it is memory as any
other: there it serves tests, since the KV cache lies there already.
"""

import logging
from typing import NamedTuple

import numpy as np
import torch

from personae.engine.plan import PageKey, PageOwner
from personae.engine.tiers.page_index import PageIndex
from personae.engine.tiers.tier import PageBytes, PageFetch
from personae.engine.tiers.writer import WriterTier
from personae.kernels.memory import zeros
from personae.kernels.sizes import size_text

_log = logging.getLogger("personae.kv")


class _Kept(NamedTuple):
    """A page, and its place."""

    key: PageKey
    slot: int


class HostTier(WriterTier):
    """Implements `Tier` in `bound` bytes of memory, behind `device`, in pages of `page_bytes`."""

    def __init__(self, bound: int, page_bytes: int, device: torch.device) -> None:
        super().__init__(page_bytes, "kv-host")
        self._pinned = device.type == "cuda"
        self._index = PageIndex[_Kept]()
        if not (count := bound // page_bytes):
            self._report(f"--kv-host-bytes is too small: a page takes {size_text(page_bytes)}")
            return
        self._slots = zeros((count, page_bytes), torch.uint8, torch.device("cpu"))
        self._free = list(range(count))
        if self._pinned:
            self._pin()
        else:
            _log.warning("--kv-host-bytes is of no use on a CPU; raise --kv-memory instead")
        self._open = True
        self._writer.start()

    def _pin(self) -> None:
        """Pin the memory. torch's own pinned memory would take up to twice the bytes."""
        status = torch.cuda.cudart().cudaHostRegister(self._slots.data_ptr(), self._slots.nbytes, 0)  # type: ignore[no-untyped-call]  # torch has no types here
        if int(status):
            _log.warning("the memory of --kv-host-bytes cannot be pinned, so copies are slower: %s", status)

    @property
    def pages(self) -> int:
        """See TierIndex."""
        return len(self._index)

    def has(self, name: bytes, source: str | None = None) -> bool:
        """See TierIndex."""
        return name in self._index

    def wants(self, name: bytes) -> bool:
        """See TierIndex."""
        return name not in self._index

    def fetch(self, fetch: PageFetch) -> int:
        """See Tier."""
        if not self._wants(fetch.ticket):
            return 0
        count, keys = 0, fetch.keys
        with self._fetch_into(fetch.ticket, len(keys)) as got:
            pages = torch.empty(len(keys), self.page_bytes, dtype=torch.uint8, pin_memory=self._pinned)
            for key in keys:
                with self._lock:  # so nobody gives the place to another page meanwhile
                    kept = self._index.get(key.name)
                    if kept is None or kept.key != key:
                        break
                    pages[count].copy_(self._slots[kept.slot])
                count += 1
            if count:
                got.append(pages[:count].numpy())
        with self._lock:
            for key in reversed(keys[:count]):  # a page is not needed longer than those before it
                self._index.use(key.name)
        return count

    def _write(self, key: PageKey, owner: PageOwner, page: PageBytes) -> None:
        with self._lock:
            if self._free:
                slot = self._free.pop()
            elif (kept := self._index.pop(owner)) is not None:
                slot = kept.slot
            else:
                return
            np.copyto(self._slots[slot].numpy(), page)
            self._index.add(key.name, _Kept(key, slot), owner)
            self._stored += 1

    def _forget(self, tenant: bytes, session: bytes) -> None:
        """Delete the pages of a session, and overwrite them with zeros."""
        with self._lock:
            for kept in self._index.remove_session(tenant, session):
                self._slots[kept.slot].zero_()
                self._free.append(kept.slot)

    def close(self) -> None:
        """See Tier."""
        if self._open:
            self._finish()
