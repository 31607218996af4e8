"""Copies an adapter's halves to their pages.

The halves are converted to the pages' form when the adapter is read (`made_ready`), or otherwise here. Then
the neighbouring pages of a module in a layer are copied together. For copies within the host's memory see
`stacking.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from personae.lora.adapter import Adapter, LoraPair
from personae.lora.copies import Copies
from personae.lora.single import scaled
from personae.lora.throttle import Rest, no_rest

Half = Literal["a", "b"]
Host = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Allocates host memory that the device can read directly."""


def sending(
    copies: Copies,
    groups: Tensor,
    pages: Sequence[int],
    pair: LoraPair | None,
    half: Half,
    gain: Tensor | None,
) -> Iterator[None]:
    """Copy a half to its pages, neighbours together. Rows past the rank are zeroed.

    groups: [groups, pages, RANK_PAGE, width], of one layer. gain: [width] float32, a factor of B.
    """
    rank, ready = 0, None
    if pair is not None:
        rank, ready = pair.rank, getattr(pair, half)
        if not pair.ready or gain is not None:
            ready = copies.host((rank, groups.shape[3]), groups.dtype)
            fold(ready, pair, half, gain)
    first = 0
    for group, begin, end in runs(pages, groups.shape[1]):
        target = groups[group, begin:end].view(-1, groups.shape[3])
        given = min(max(rank - first, 0), len(target))
        if ready is not None and given:
            copies.copy(target[:given], ready[first : first + given])
        if given < len(target):
            copies.clear(target[given:])
        first += len(target)
        yield


def fold(out: Tensor, pair: LoraPair, half: Half, gain: Tensor | None = None) -> None:
    """Fill [rank, width] with a half in the device's form: its dtype, and B multiplied by scaling and
    gain."""
    if half == "a":
        scaled(out, pair.a)
    else:
        scaled(out, pair.b, pair.scaling, gain)


def made_ready(adapter: Adapter, dtype: torch.dtype, host: Host, rest: Rest = no_rest) -> Adapter:
    """The adapter in the device's form, in memory from `host`. Unchanged if its B depends on the base (DoRA).
    `rest` is called regularly."""
    if adapter.dora_bias:
        return adapter
    # One allocation for all: the driver takes long to allocate such memory, and delays launches meanwhile.
    memory = host((sum(pair.a.numel() + pair.b.numel() for pair in adapter.pairs.values()),), dtype)
    pairs, first = {}, 0
    for site, pair in adapter.pairs.items():
        rest()
        middle = first + pair.a.numel()
        last = middle + pair.b.numel()
        a, b = memory[first:middle].view_as(pair.a), memory[middle:last].view_as(pair.b)
        ready = LoraPair(a, b, 1.0, ready=True, experts=pair.experts)
        fold(ready.a, pair, "a")
        fold(ready.b, pair, "b")
        pairs[site], first = ready, last
    held = sum(pair.a.nbytes + pair.b.nbytes for pair in adapter.pairs.values())
    return replace(adapter, pairs=pairs, nbytes=adapter.nbytes - held + memory.nbytes)


def runs(pages: Sequence[int], size: int) -> Iterator[tuple[int, int, int]]:
    """Runs of neighbouring pages, in order: (group, first place, place past the last). A group has `size`
    pages."""
    places = [(*divmod(page, size), number) for number, page in enumerate(pages)]
    for _, run in groupby(places, key=lambda at: (at[0], at[1] - at[2])):
        found = list(run)
        yield found[0][0], found[0][1], found[-1][1] + 1
