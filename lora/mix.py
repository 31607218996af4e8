"""Mixes: several adapters at once, whose updates are added with weights.

A mix is an adapter too. Its rows of A are those of its parts, one after the other. So are its rows of B, each
multiplied by its scaling and weight (PEFT's `add_weighted_adapter` with "cat"). Its identity names its parts,
so the mix can be made from the identity, and nothing of it must be stored.
"""

from collections.abc import Sequence

import torch

from personae.errors import AdapterError
from personae.lora.adapter import Adapter, LoraPair, make_adapter


def mixed(id: str, parts: Sequence[tuple[Adapter, float]]) -> Adapter:
    """The mix with that identity. Raises AdapterError for an adapter that is more than low rank."""
    for adapter, _ in parts:
        if adapter.traits():
            raise AdapterError(f"{adapter.name!r} is {', '.join(adapter.traits())} and cannot be combined")
    pairs = {}
    for site in sorted({site for adapter, _ in parts for site in adapter.pairs}):
        found = [(adapter.pairs[site], weight) for adapter, weight in parts if site in adapter.pairs]
        a = torch.cat([pair.a.float() for pair, _ in found])
        b = torch.cat([pair.b.float() * (pair.scaling * weight) for pair, weight in found])
        pairs[site] = LoraPair(a, b, 1.0)
    return make_adapter(" + ".join(adapter.name for adapter, _ in parts), pairs, digest=id)
