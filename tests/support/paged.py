"""Drives a decoder over a paged cache. Pages are in random order and hold NaN until they are written."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from personae.engine.kv import KVCache
from personae.engine.models.decoder import Decoder
from personae.engine.plan import MemoryLayout
from personae.kernels.attention import AttentionBatch
from personae.lora.context import LoraContext


class PagedSequences:
    """Sequences by name. Each keeps its tokens and its pages, which are assigned in random order.

    `step` appends tokens to several sequences in one packed forward pass and returns the logits of each one's
    last token.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_pages: int = 96,
        page_size: int = 16,
        seed: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        layout = MemoryLayout(num_pages, page_size, max_seqs=64, max_model_len=4096, max_batch_tokens=4096)
        self.decoder = decoder
        self.kv = KVCache(decoder.config.kv_specs, layout, kv_dtype or decoder.dtype, decoder.device)
        for group in self.kv.groups.values():
            group.fill_(-1 if group.dtype is torch.int8 else torch.nan)  # then scales are NaN
        for states in self.kv.states.values():
            states.fill_(torch.nan)
        self.lengths: dict[str, int] = {}
        self.pages: dict[str, list[int]] = {}
        self._free = random.Random(seed).sample(range(num_pages), num_pages)

    def step(self, chunks: dict[str, Sequence[int]], lora: LoraContext | None = None) -> dict[str, Tensor]:
        """Run one forward pass. Returns the last token's logits by name, float32 [vocab]."""
        hidden, batch = self.forward(chunks, lora)
        logits = self.decoder.logits(hidden[batch.query_start[1:].long() - 1])
        return dict(zip(chunks, logits, strict=True))

    def forward(
        self,
        chunks: dict[str, Sequence[int]],
        lora: LoraContext | None = None,
        overlap: Callable[[], None] | None = None,
    ) -> tuple[Tensor, AttentionBatch]:
        """Run one forward pass. Returns the hidden rows of all packed tokens, and the batch."""
        starts = {name: self.lengths.get(name, 0) for name in chunks}
        for name, chunk in chunks.items():
            self.lengths[name] = starts[name] + len(chunk)
            table = self.pages.setdefault(name, [])
            while len(table) * self.kv.page_size < self.lengths[name]:
                table.append(self._free.pop())
        device = self.decoder.device
        batch = attention_batch(
            [(starts[name], len(chunk), self.pages[name]) for name, chunk in chunks.items()],
            self.kv.page_size,
            device,
        )
        tokens = torch.tensor([token for chunk in chunks.values() for token in chunk], device=device)
        positions = torch.cat([torch.arange(starts[name], self.lengths[name]) for name in chunks]).to(device)
        return self.decoder.forward(tokens, positions, self.kv, batch, lora, overlap), batch

    def greedy(self, name: str, prompt: Sequence[int], count: int) -> list[int]:
        """Append a prompt and continue it greedily, token by token."""
        answer, chunk = [], list(prompt)
        for _ in range(count):
            chunk = [int(self.step({name: chunk})[name].argmax())]
            answer += chunk
        return answer


@contextmanager
def layer_by_layer(decoder: Decoder) -> Iterator[None]:
    """Within the block the decoder runs its layers in order, even if a backend has replaced them."""
    fused, decoder._fused = decoder._fused, None
    try:
        yield
    finally:
        decoder._fused = fused


def attention_batch(
    rows: Sequence[tuple[int, int, Sequence[int]]], page_size: int, device: torch.device
) -> AttentionBatch:
    """The batch of rows (start, count, page ids): of each row, `count` positions from `start` are
    computed."""
    counts = [count for _, count, _ in rows]
    lengths = [start + count for start, count, _ in rows]
    width = max(len(pages) for _, _, pages in rows)
    write = [
        pages[position // page_size] * page_size + position % page_size
        for start, count, pages in rows
        for position in range(start, start + count)
    ]
    return AttentionBatch(
        query_start=torch.tensor([0, *counts], device=device).cumsum(0).int(),
        kv_length=torch.tensor(lengths, dtype=torch.int32, device=device),
        page_table=torch.tensor(
            [[*pages, *[0] * (width - len(pages))] for _, _, pages in rows], dtype=torch.int32, device=device
        ),
        write_index=torch.tensor(write, device=device),
        max_query=max(counts),
        max_kv=max(lengths),
    )
