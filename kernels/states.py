"""Recurrent states of sequences, kept by pages.

A page is a sequence of windows of 16 tokens. It has the state before each of its last two windows, and of the
tokens of these what the state's update needs. So the state after a token follows from its window alone, as
often as a step asks for it: the newest 12 tokens can be computed again, and a full page can be shared.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from personae.kernels.attention import AttentionBatch
from personae.kernels.upload import uploads

WINDOW = 16  # tokens


def windows(page_size: int) -> tuple[int, int]:
    """How many windows a page has in memory, and the tokens of each. page_size: a power of two."""
    size = min(WINDOW, page_size)
    return min(2, page_size // size), size


@dataclass(frozen=True, slots=True, eq=False)
class StatePlan:
    """The W windows from which a step computes states: of each row those with its tokens, and the window
    before if its first token begins one. The windows of a row are neighbours here. All tensors are on the
    model's device, and int64 unless noted.

    size: the tokens of a window; `tokens` is the same, or the most that are there if no row has two windows.
    pages, slots: [W], where each window is: the page's id, and its number among those that the page has.
    pages_before, slots_before: [W], those of the windows before them in their rows. begins: [W] bool, the
    windows without one. valid: [W, tokens] bool, the tokens that are there. rounds: the windows that are
    computed together, because those before them in their rows are done, by their numbers among the W.
    onward: of each round, which of its windows the next round follows. earlier: [first round, tokens] bool,
    the tokens before the step's. newest, places: the tokens of the step that are kept, and where. out: [T],
    each token's place among W * tokens.
    """

    size: int
    pages: Tensor
    slots: Tensor
    pages_before: Tensor
    slots_before: Tensor
    begins: Tensor
    valid: Tensor
    rounds: tuple[Tensor, ...]
    onward: tuple[Tensor, ...]
    earlier: Tensor
    newest: Tensor
    places: Tensor
    out: Tensor

    @property
    def alone(self) -> bool:
        """Whether each row has one token."""
        return len(self.out) == len(self.rounds[0])


def plan_states(batch: AttentionBatch, page_size: int) -> StatePlan:
    """The plan of a step for all layers with states. Waits for the device only where `AttentionBatch.sizes`
    does."""
    starts, lengths = batch.sizes()
    slots, size = windows(page_size)
    rows: list[int] = []
    numbers: list[int] = []  # of the windows in their rows
    counts: list[int] = []
    depths: list[list[int]] = []
    earlier: list[int] = []  # how many tokens of each row's first window
    newest: list[int] = []
    out: list[int] = []
    kept = slots * size
    spans = [
        (max(end - (stop - first) - 1, 0) // size, -(-end // size))
        for (first, stop), end in zip(pairwise(starts), lengths, strict=True)
    ]
    single = all(stop - first == 1 for first, stop in spans)
    tokens = (
        max(end - first * size for (first, _), end in zip(spans, lengths, strict=True)) if single else size
    )
    for row, (first, stop) in enumerate(pairwise(starts)):
        end = lengths[row]
        start = end - (stop - first)
        lowest, highest = spans[row]
        base = len(rows)
        earlier.append(start - lowest * size)
        newest += (  # not those that later ones of their page replace
            first + position - start
            for position in range(start, end)
            if position + kept >= min(end, (position // page_size + 1) * page_size)
        )
        for number in range(lowest, highest):
            if number - lowest == len(depths):
                depths.append([])
            depths[number - lowest].append(len(rows))
            rows.append(row)
            numbers.append(number)
            counts.append(min(end - number * size, size))
        out += range(base * tokens - lowest * size + start, base * tokens - lowest * size + end)
    onward = []
    for own, further in pairwise(depths):
        index = {window: i for i, window in enumerate(own)}
        onward.append([index[window - 1] for window in further])
    device = batch.page_table.device
    lists = (rows, numbers, counts, earlier, newest, out, *depths, *onward)
    there = uploads([np.array(values, np.int64) for values in lists], device)
    of_row, of_number, present, present_before, writes, places = there[:6]
    rounds, onwards = there[6 : 6 + len(depths)], there[6 + len(depths) :]
    before = (of_number - 1).clamp(min=0)
    of_window = torch.arange(tokens, device=device)
    place = batch.write_index[writes]
    return StatePlan(
        size=size,
        pages=batch.page_table[of_row, of_number * size // page_size].long(),
        slots=of_number % slots,
        pages_before=batch.page_table[of_row, before * size // page_size].long(),
        slots_before=before % slots,
        begins=of_number == 0,
        valid=of_window < present.unsqueeze(1),
        rounds=rounds,
        onward=onwards,
        earlier=of_window < present_before.unsqueeze(1),
        newest=writes,
        places=place // page_size * kept + place % page_size % kept,
        out=places,
    )
