"""The paged key/value cache: one tensor for all layers, cut into pages that page tables hand out.

It lies by layers, which on a CPU is the faster way to read it. Where its memory is lent in granules, it lies
by pages: a page's keys and values of all layers side by side fill whole granules, or a few pages together do
(a run), where by layers it would take as many idle neighbours as fill a granule in each layer.
"""

from collections.abc import Collection, Iterator, Sequence
from math import gcd

import torch
from torch import Tensor

from personae.engine.config import ModelConfig
from personae.engine.plan import MemoryLayout
from personae.kernels.memory import Memory, giving_back_pages, memory_of


class KVCache:
    """`data: [layers, 2, num_pages, kv_heads, page_size, head_dim]`; index 1 is 0 for keys, 1 for values.

    Who owns which page is the scheduler's business; the cache only holds them. With `spare` there is one page
    more, `spare_page`, which nobody owns: what is written there is not wanted. `memory`: the device's.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: MemoryLayout,
        dtype: torch.dtype,
        device: torch.device,
        *,
        spare: bool = False,
        memory: Memory | None = None,
    ) -> None:
        self.page_size = layout.page_size
        self.num_pages = layout.num_pages
        self.spare_page = layout.num_pages if spare else None
        pages, place = layout.num_pages + spare, (config.kv_heads, layout.page_size, config.head_dim)
        self.page_bytes = self.bytes_per_page(config, layout.page_size, dtype)
        self._run = layout.run
        self._memory = memory_of(device, 0) if memory is None else memory
        if self._memory.granule:
            self._pages = self._memory.reserve((pages, config.layers, 2, *place), dtype)
            self._memory.back(self._pages)
            self.data = self._pages.permute(1, 2, 0, 3, 4, 5)
        else:
            self.data = self._memory.reserve((config.layers, 2, pages, *place), dtype)
        self._layers = [(layer[0], layer[1]) for layer in self.data]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """The keys and values of one layer, each `[num_pages, kv_heads, page_size, head_dim]`."""
        return self._layers[index]

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages (source, destination) in all layers, one pair after the other."""
        for source, destination in pairs:
            self.data[:, :, destination] = self.data[:, :, source]

    def giving_back(self, pages: Collection[int]) -> Iterator[None]:
        """Let others have the memory of these pages, whole runs, a piece at a time; by layers, of which
        there may be thousands: each page has a place for each layer."""
        if self._memory.granule:
            for run in self._runs(pages):
                self._memory.give_back(run)
                yield
            return
        for half in self.data.flatten(0, 1):
            yield from giving_back_pages(self._memory, half, pages)

    def having_back(self, pages: Collection[int]) -> Iterator[None]:
        """Have memory behind pages again that were given back, a run at a time."""
        if self._memory.granule:
            for run in self._runs(pages):
                self._memory.back(run)
                yield

    def _runs(self, pages: Collection[int]) -> Iterator[Tensor]:
        for run in sorted({page // self._run for page in pages}):
            yield self._pages[run * self._run : (run + 1) * self._run]

    @staticmethod
    def bytes_per_page(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
        """What one page costs in memory, over all layers, keys and values."""
        return config.layers * 2 * config.kv_heads * page_size * config.head_dim * dtype.itemsize


def pages_of_a_run(page_bytes: int, granule: int) -> int:
    """The fewest neighbouring pages, the first a multiple of that number, that fill whole granules."""
    return granule // gcd(granule, page_bytes) if granule else 1
