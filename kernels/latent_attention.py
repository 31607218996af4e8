"""Attention over a paged cache with one latent vector for each token (MLA), for packed batches that mix
prefill and decode.

A token's query can be brought to the latent space (absorbed), or a row's keys and values can be computed from
its latent vectors. The first costs more for each pair of a query and a key, the second once for each key.
So a row with enough tokens in a step is a prompt, whose keys and values are computed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from personae.kernels.attention import AttentionBatch
from personae.kernels.reference import dequantize_kv


@dataclass(frozen=True, slots=True)
class LatentRow:
    """A row of a step: the places of its tokens in the step, and how many it has with those in the cache."""

    number: int
    tokens: slice
    length: int


class LatentPlan:
    """Which rows of a step are prompts, and which are absorbed, for all layers with latent attention.

    `latent`: the width of the latent vectors, `width`: that of a key without rotary embedding and a value.
    `plain`: False if all rows must be absorbed. Waits for the device only where `AttentionBatch.sizes` does.
    """

    def __init__(self, batch: AttentionBatch, latent: int, width: int, *, plain: bool = True) -> None:
        self.latent, self.batch = latent, batch
        self.prompts: list[LatentRow] = []
        self.absorbed: list[LatentRow] = []
        self.runs: list[slice] = []
        """Neighbouring tokens of absorbed rows."""
        starts, lengths = batch.sizes()
        of_key, of_pair = latent * width, 2 * latent - width  # what each saves or costs a head
        for number, (start, stop) in enumerate(pairwise(starts)):
            row = LatentRow(number, slice(start, stop), lengths[number])
            count = stop - start
            if plain and count > 1 and count * (row.length * of_pair + of_key) > row.length * of_key:
                self.prompts.append(row)
                continue
            self.absorbed.append(row)
            if self.runs and self.runs[-1].stop == start:
                start = self.runs.pop().start
            self.runs.append(slice(start, stop))

    def vectors(self, row: LatentRow, cache: Tensor) -> Tensor:
        """What the cache has of a row: [length, D], in its dtype; of an int8 cache float32."""
        pages = self.batch.page_table[row.number, : -(-row.length // cache.shape[2])].long()
        stored = cache.view(torch.uint8)[pages].view(cache.dtype)  # torch cannot index FP8
        kept = stored[:, 0].flatten(0, 1)[: row.length]
        return dequantize_kv(kept) if cache.dtype is torch.int8 else kept

    def overlaps(self, tokens: slice) -> Iterator[slice]:
        """The parts of these tokens that are absorbed."""
        for run in self.runs:
            start, stop = max(run.start, tokens.start), min(run.stop, tokens.stop)
            if start < stop:
                yield slice(start, stop)

    @cached_property
    def numbers(self) -> Tensor:
        """From 0 to T, [T + 1] int32 on the device."""
        count = len(self.batch.write_index) + 1
        return torch.arange(count, dtype=torch.int32, device=self.batch.query_start.device)

    @cached_property
    def by_token(self) -> tuple[Tensor, Tensor]:
        """The row of each token of the step, and how many tokens of its row it sees, 0 for those of prompts:
        both [T] int32 on the device."""
        batch, numbers = self.batch, self.numbers[:-1]
        row = torch.searchsorted(batch.query_start[1:], numbers, right=True, out_int32=True)
        seen = batch.kv_length[row] - (batch.query_start[1:][row] - 1 - numbers)
        for prompt in self.prompts:
            seen[prompt.tokens] = 0
        return row, seen
