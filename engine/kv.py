"""The paged key/value cache: one tensor for all layers, cut into pages that page tables hand out."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from personae.engine.config import ModelConfig
from personae.engine.plan import MemoryLayout
from personae.kernels.memory import giving_back_pages, zeros


class KVCache:
    """`data: [layers, 2, num_pages, kv_heads, page_size, head_dim]`; index 1 is 0 for keys, 1 for values.

    Who owns which page is the scheduler's business; the cache only holds them. With `spare` there is one page
    more, `spare_page`, which nobody owns: what is written there is not wanted.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: MemoryLayout,
        dtype: torch.dtype,
        device: torch.device,
        *,
        spare: bool = False,
    ) -> None:
        self.page_size = layout.page_size
        self.num_pages = layout.num_pages
        self.spare_page = layout.num_pages if spare else None
        pages = layout.num_pages + spare
        shape = (config.layers, 2, pages, config.kv_heads, layout.page_size, config.head_dim)
        self.page_bytes = self.bytes_per_page(config, layout.page_size, dtype)
        self.data = zeros(shape, dtype, device)
        self._layers = [(layer[0], layer[1]) for layer in self.data]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """The keys and values of one layer, each `[num_pages, kv_heads, page_size, head_dim]`."""
        return self._layers[index]

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages (source, destination) in all layers, one pair after the other."""
        for source, destination in pairs:
            self.data[:, :, destination] = self.data[:, :, source]

    def giving_back(self, pages: Collection[int]) -> Iterator[None]:
        """Let the system have the memory of these pages, until they are written again; a piece at a time, of
        which there may be thousands: each page has a place for each layer."""
        for half in self.data.flatten(0, 1):
            yield from giving_back_pages(half, pages)

    @staticmethod
    def bytes_per_page(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
        """What one page costs in memory, over all layers, keys and values."""
        return config.layers * 2 * config.kv_heads * page_size * config.head_dim * dtype.itemsize
