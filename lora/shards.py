"""Which part of a linear module is a rank's, and an adapter's part that belongs to it.

Tensor parallelism cuts a module by its outputs (columns of the product: q, k, v, gate, up) or by its inputs
(rows: o, down). In the first case a rank has the adapter's whole A and its own outputs of B, in the second
its own inputs of A and the whole B. The ranks' results are summed after the adapter's update, so adapters
need no further communication.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from personae.lora.adapter import Adapter, LoraPair
from personae.lora.dora import DoraBias

OUTPUTS: Literal[0] = 0
INPUTS: Literal[1] = 1


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a weight [outputs, inputs], or of a vector [outputs], that is a rank's: these ranges of
    dimension `dim`, one after the other. `experts`: of a module of experts, those whose parts it has, if
    these are not all."""

    dim: Literal[0, 1]
    ranges: tuple[tuple[int, int], ...]
    experts: range | None = None

    def of(self, whole: Tensor, dim: int | None = None) -> Tensor:
        """The part of a tensor: a view if it is one range. `dim`: instead of the shard's own."""
        cut = self.dim if dim is None else dim
        parts = [whole.narrow(cut, start, stop - start) for start, stop in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, cut)

    def scaled(self, numerator: int, denominator: int) -> "Shard":
        """The same part of a dimension that has numerator / denominator as many entries. Raises ValueError if
        it begins or ends between two of them."""
        ranges = tuple((start * numerator, stop * numerator) for start, stop in self.ranges)
        if any(bound % denominator for pair in ranges for bound in pair):
            raise ValueError(f"{self.ranges} does not end between blocks of {denominator // numerator}")
        return Shard(self.dim, tuple((a // denominator, b // denominator) for a, b in ranges))


def joined(shards: list[Shard], sizes: list[int]) -> Shard:
    """The shard, by outputs, of modules with these many outputs that are one tensor, one after the other."""
    ranges: list[tuple[int, int]] = []
    offset = 0
    for shard, size in zip(shards, sizes, strict=True):
        ranges += [(offset + start, offset + stop) for start, stop in shard.ranges]
        offset += size
    return Shard(OUTPUTS, tuple(ranges))


def sharded(adapter: Adapter, shards: Mapping[str, Shard], *, first: bool) -> Adapter:
    """The adapter's part for a rank: `shards` by module; other modules are whole on every rank. `first`: it
    is the first rank, which adds the biases of modules that are cut by their inputs.

    Its identity and the bounds of its values stay those of the whole, so all ranks accept or refuse it alike.
    """
    pairs = {
        (layer, module): _pair(pair, shards.get(module)) for (layer, module), pair in adapter.pairs.items()
    }
    biases = {
        (layer, module): _vectors(vectors, shards.get(module), first)
        for (layer, module), vectors in adapter.dora_bias.items()
    }
    before, after = (
        sum(pair.a.nbytes + pair.b.nbytes for pair in own.values()) for own in (adapter.pairs, pairs)
    )
    held = {module: shard.experts for module, shard in shards.items() if shard.experts is not None}
    return replace(
        adapter,
        pairs=pairs,
        ranks={
            module: rank // adapter.experts[module] * len(held[module]) if module in held else rank
            for module, rank in adapter.ranks.items()
        },
        experts={
            module: len(held[module]) if module in held else count
            for module, count in adapter.experts.items()
        },
        dora_bias=biases,
        nbytes=adapter.nbytes - before + after,
    )


def of_layers(adapter: Adapter, layers: range, *, vocabulary: bool) -> Adapter:
    """The adapter's part for a stage that has these layers of the base, which are numbered from 0 there.
    `vocabulary`: the stage has the embedding and the output matrix.

    Its identity and the bounds of its values stay those of the whole.
    """
    first = layers.start
    found = _kept(adapter, lambda layer, module: layer in layers)
    return replace(
        found,
        pairs={(layer - first, module): pair for (layer, module), pair in found.pairs.items()},
        dora_bias={(layer - first, module): vectors for (layer, module), vectors in found.dora_bias.items()},
        vocabulary=adapter.vocabulary if vocabulary else (),
    )


def of_modules(adapter: Adapter, modules: Collection[str]) -> Adapter:
    """The adapter's part for a rank that has only these modules of a layer.

    Its identity and the bounds of its values stay those of the whole.
    """
    return _kept(adapter, lambda layer, module: module in modules)


def _kept(adapter: Adapter, keeps: Callable[[int, str], bool]) -> Adapter:
    """The adapter without the sites (layer, module) that are not kept."""
    pairs = {site: pair for site, pair in adapter.pairs.items() if keeps(*site)}
    biases = {site: vectors for site, vectors in adapter.dora_bias.items() if keeps(*site)}
    modules = {module for _, module in pairs}
    before, after = (
        sum(pair.a.nbytes + pair.b.nbytes for pair in own.values()) for own in (adapter.pairs, pairs)
    )
    return replace(
        adapter,
        pairs=pairs,
        ranks={module: rank for module, rank in adapter.ranks.items() if module in modules},
        experts={module: count for module, count in adapter.experts.items() if module in modules},
        dora_bias=biases,
        nbytes=adapter.nbytes - before + after,
    )


def _pair(pair: LoraPair, shard: Shard | None) -> LoraPair:
    if shard is None:
        return pair
    if shard.experts is not None:
        pair = _of_experts(pair, shard.experts)
    if shard.dim == OUTPUTS:
        return replace(pair, b=shard.of(pair.b, 1).contiguous())
    return replace(pair, a=shard.of(pair.a, 1).contiguous())


def _of_experts(pair: LoraPair, experts: range) -> LoraPair:
    each = pair.rank // pair.experts
    rows = slice(experts.start * each, experts.stop * each)
    return replace(pair, a=pair.a[rows].contiguous(), b=pair.b[rows].contiguous(), experts=len(experts))


def _vectors(vectors: DoraBias, shard: Shard | None, first: bool) -> DoraBias:
    if shard is None:
        return vectors
    if shard.dim == INPUTS:
        return vectors if first else DoraBias(magnitude=vectors.magnitude)
    return DoraBias(**{name: shard.of(vector).contiguous() for name, vector in vectors.tensors()})
