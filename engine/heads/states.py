"""The hidden states that a head reads, kept by the pages of the model's KV cache.

A token's hidden state depends on the tokens before it, as its keys and values do. So it lies where they lie,
is shared with them through the prefix cache, and comes anew after a preemption or a restart. What is kept is
h, which the head combines from the states of its layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from personae.engine.heads.head import Head
from personae.engine.plan import MemoryLayout


class HeadStates:
    """Keeps what a head reads of every token that the model computes, by the pages of the cache. `values`:
    [places, hidden_size], by the place of a token's keys. The last page is for padding."""

    def __init__(self, head: Head, layout: MemoryLayout) -> None:
        self._head = head
        self._page_size = layout.page_size
        places = (layout.num_pages + 1) * layout.page_size
        self.values = torch.zeros(places, head.hidden_size, dtype=head.dtype, device=head.device)

    @property
    def layers(self) -> tuple[int, ...]:
        """It reads the residual stream as it enters these layers, ascending. The number of layers means as it
        leaves the last."""
        return self._head.layers

    @property
    def pages(self) -> Tensor:
        """What is kept, by page: [pages, ...]."""
        return self.values.view(-1, self._page_size, self.values.shape[1])

    def write(self, hidden: Tensor, places: Tensor) -> None:
        """hidden: [T, len(layers), hidden_size]; places: [T] int64, as those of keys and values."""
        self.values[places] = self._head.combine(hidden)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See KVCache."""
        pages = self.pages
        for source, destination in pairs:
            pages[destination] = pages[source]
