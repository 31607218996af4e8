"""Mixes: several adapters at once, whose updates are added with weights.

A mix is an adapter too. Its rows of A are those of its parts, one after the other. So are its rows of B, each
multiplied by its scaling and weight (PEFT's `add_weighted_adapter` with "cat"). Its identity names its parts,
so the mix can be made from the identity, and nothing of it must be stored.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from personae.errors import AdapterError
from personae.lora.adapter import Adapter, LoraPair, make_adapter


def mixed(id: str, parts: Sequence[tuple[Adapter, float]]) -> Adapter:
    """The mix with that identity. Raises AdapterError for an adapter that is more than low rank."""
    for adapter, _ in parts:
        if adapter.traits():
            raise AdapterError(f"{adapter.name!r} is {', '.join(adapter.traits())} and cannot be combined")
    pairs: dict[tuple[int, str], LoraPair] = {}
    for site in sorted({site for adapter, _ in parts for site in adapter.pairs}):
        found = [(adapter.pairs[site], weight) for adapter, weight in parts if site in adapter.pairs]
        experts = found[0][0].experts
        a = _joined([pair.a.float() for pair, _ in found], experts)
        b = _joined([pair.b.float() * (pair.scaling * weight) for pair, weight in found], experts)
        pairs[site] = LoraPair(a, b, 1.0, experts=experts)
    most: dict[str, int] = {}
    for (_, module), pair in pairs.items():
        most[module] = max(most.get(module, 0), pair.rank)
    pairs = {site: _widened(pair, most[site[1]]) for site, pair in pairs.items()}
    return make_adapter(" + ".join(adapter.name for adapter, _ in parts), pairs, digest=id)


def _joined(halves: Sequence[Tensor], experts: int) -> Tensor:
    """[rank, width] each -> all ranks, those of one expert together."""
    return torch.cat([half.view(experts, -1, half.shape[1]) for half in halves], 1).flatten(0, 1)


def _widened(pair: LoraPair, rank: int) -> LoraPair:
    """The pair of experts with that many ranks, the further ones zero: an expert's pages are the same in all
    layers."""
    if pair.experts == 1 or pair.rank == rank:
        return pair
    further = (rank - pair.rank) // pair.experts
    a, b = (
        _joined([half, half.new_zeros(further * pair.experts, half.shape[1])], pair.experts)
        for half in (pair.a, pair.b)
    )
    return replace(pair, a=a, b=b)
