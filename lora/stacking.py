"""Adapters in the form of the host's own pool: for each module, one tensor per half for all layers.

The thread that reads an adapter converts it to this form. Placing it then takes only a few copies, each of
one page in many layers. The thread that runs the steps has no time for a call per page and layer, which takes
far longer than copying the bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from personae.kernels.sgmv import RANK_PAGE
from personae.lora.adapter import Adapter, LoraPair
from personae.lora.single import AT_ONCE
from personae.lora.throttle import Rest, no_rest
from personae.lora.writing import fold


def stacked(adapter: Adapter, layers: int, dtype: torch.dtype, rest: Rest = no_rest) -> Adapter:
    """The adapter with `stacks`, of which its pairs are parts. They are zero where a layer has fewer ranks.
    Unchanged if its B depends on the base (DoRA). `rest` is called regularly."""
    if adapter.dora_bias:
        return adapter
    widths = {module: (pair.a.shape[1], pair.b.shape[1]) for (_, module), pair in adapter.pairs.items()}
    stacks: dict[str, tuple[Tensor, Tensor]] = {}
    for module, rank in adapter.ranks.items():
        rest()
        a, b = (torch.zeros(layers, rank, width, dtype=dtype) for width in widths[module])
        stacks[module] = a, b
    pairs = {}
    for (layer, module), pair in adapter.pairs.items():
        rest()
        a, b = (half[layer, : pair.rank] for half in stacks[module])
        fold(a, pair, "a")
        fold(b, pair, "b")
        pairs[layer, module] = LoraPair(a, b, 1.0, ready=True, experts=pair.experts)
    before = sum(pair.a.nbytes + pair.b.nbytes for pair in adapter.pairs.values())
    after = sum(a.nbytes + b.nbytes for a, b in stacks.values())
    return replace(adapter, pairs=pairs, stacks=stacks, nbytes=adapter.nbytes - before + after)


def stacking(groups: Tensor, pages: Sequence[int], stack: Tensor) -> Iterator[None]:
    """Copy a half of a module to its pages. The rest of the last page is zeroed.

    groups: [groups, layers, pages, RANK_PAGE, width]. stack: [layers, rank, width], of the same dtype. A
    piece is one page in some of the layers, in parts so small that torch copies them on this thread.
    """
    layers, rank, width = stack.shape
    ranks = min(max(AT_ONCE // width, 1), RANK_PAGE)
    some = max(AT_ONCE // (ranks * width), 1)
    for number, page in enumerate(pages):
        group, place = divmod(page, groups.shape[2])
        begin = number * RANK_PAGE
        have = min(rank - begin, RANK_PAGE)
        for layer in range(0, layers, some):
            target = groups[group, layer : layer + some, place]
            source = stack[layer : layer + some, begin : begin + have]
            for first in range(0, RANK_PAGE, ranks):
                given = min(max(have - first, 0), ranks)
                if given:
                    target[:, first : first + given].copy_(source[:, first : first + given])
                if given < ranks:
                    target[:, first + given : first + ranks].zero_()
            yield
