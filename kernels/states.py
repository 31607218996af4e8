"""Recurrent states of sequences, kept by pages.

A page has the state before its first token, and of each of its tokens what the state's update needs. So the
state after any token follows from the token's page alone, as often as a step asks for it: a page can be
shared, copied up to any token, and computed again.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from personae.kernels import reference_states
from personae.kernels.attention import AttentionBatch
from personae.kernels.registry import Operator


@dataclass(frozen=True, slots=True, eq=False)
class StatePlan:
    """The W pages from which a step computes states: of each row those with its tokens, and the page before
    if its first token begins a page. The pages of a row are neighbours here. All tensors are on the model's
    device.

    pages: [W] int64, their ids. before: [W] int64, the ids of the pages before them in their rows, -1 for a
    row's first page. valid: [W, page_size], the tokens that are there. rounds: the pages that are computed
    together, because those before them in their rows are done: their numbers among the W, int64. onward: of
    each round, which of its pages the next round follows. out: [T] int64, each token's place among W *
    page_size.
    """

    pages: Tensor
    before: Tensor
    valid: Tensor
    rounds: tuple[Tensor, ...]
    onward: tuple[Tensor, ...]
    out: Tensor


def plan_states(batch: AttentionBatch, page_size: int) -> StatePlan:
    """The plan of a step for all layers with states. Waits for the device."""
    starts, lengths = batch.query_start.tolist(), batch.kv_length.tolist()
    rows: list[int] = []
    numbers: list[int] = []  # of the pages in their rows
    counts: list[int] = []
    depths: list[list[int]] = []
    out: list[int] = []
    for row, (first, stop) in enumerate(pairwise(starts)):
        end = lengths[row]
        start = end - (stop - first)
        lowest = max(start - 1, 0) // page_size
        base = len(rows)
        for number in range(lowest, -(-end // page_size)):
            if number - lowest == len(depths):
                depths.append([])
            depths[number - lowest].append(len(rows))
            rows.append(row)
            numbers.append(number)
            counts.append(min(end - number * page_size, page_size))
        out += range((base - lowest) * page_size + start, (base - lowest) * page_size + end)
    device = batch.page_table.device

    def there(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    onward = [
        [own.index(window - 1) for window in further]
        for own, further in zip(depths, depths[1:], strict=False)
    ]
    row, number = there(rows), there(numbers)
    before = batch.page_table[row, (number - 1).clamp(min=0)].long()
    return StatePlan(
        pages=batch.page_table[row, number].long(),
        before=torch.where(number > 0, before, -1),
        valid=torch.arange(page_size, device=device) < there(counts).unsqueeze(1),
        rounds=tuple(map(there, depths)),
        onward=(*map(there, onward), there([])),
        out=there(out),
    )


gated_delta = Operator(reference_states.gated_delta)
selective_state = Operator(reference_states.selective_state)
