"""Embeddings of a token for each layer, as Gemma 3n and 4 have them: a vector from a second table, and one
computed from the token's embedding. A third part of each layer lets the residual stream choose what of them
it adds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from personae.engine.layers.block import BlockContext, UndividedBlock
from personae.engine.layers.embedding import TokenEmbedding
from personae.engine.layers.linear import Linear
from personae.engine.layers.mlp import PLAIN, Activation
from personae.engine.layers.norm import Norm
from personae.engine.layers.step import ForwardContext
from personae.engine.quantization.base import PER_LAYER
from personae.kernels.decoder import Weight
from personae.lora.shards import INPUTS, OUTPUTS, Shard
from personae.lora.sites import LoraSite

GATE, PROJECTION = "per_layer_input_gate", "per_layer_projection"


class PerLayerEmbedding:
    """p = (norm(x W / sqrt(hidden)) + sqrt(size) E[token]) / sqrt(2), for each of a stage's `layers`. The
    model has `total` layers. Ranks that share a stage each have all of it."""

    def __init__(
        self, size: int, layers: range, total: int, tokens: int, vocab_size: int, context: BlockContext
    ) -> None:
        self.size, self.layers, self._beyond = size, len(layers), tokens < vocab_size
        width = len(layers) * size
        self.table = TokenEmbedding(
            (PER_LAYER,), tokens, width, scheme=context.scheme, dtype=context.dtype, device=context.device
        )
        self._tokens = tokens
        self._own = None if len(layers) == total else (layers.start * size, layers.stop * size)
        self.projection = context.linear(
            ("model.per_layer_model_projection",),
            context.hidden_size,
            (width,),
            bias=False,
            shards=() if self._own is None else (Shard(OUTPUTS, (self._own,)),),
        )
        self.norm = context.norm(size)
        self._scale, self._table_scale = (
            float(torch.tensor(scale, dtype=context.dtype))
            for scale in (context.hidden_size**-0.5, size**0.5)
        )

    def __call__(self, tokens: Tensor, x: Tensor) -> Tensor:
        """tokens: [T] int64, x: [T, hidden], their embedding -> [T, layers, size]."""
        if self._beyond:  # tokens of images and sound have the first token's
            tokens = tokens.masked_fill(tokens >= self._tokens, 0)
        own = self.table(tokens) * self._table_scale
        computed = (self.projection(x) * self._scale).view(len(x) * self.layers, self.size)
        return (self.norm(computed) + own.view(-1, self.size)).mul_(2**-0.5).view(-1, self.layers, self.size)

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """(checkpoint name, the view to fill) of each parameter."""
        yield f"{PER_LAYER}.weight", self.table.weight
        yield from self.projection.tensors()
        yield from self.norm.tensors("model.per_layer_projection_norm")

    def shards(self) -> Iterator[tuple[str, Shard]]:
        """See Block."""
        if self._own is not None:
            yield f"{PER_LAYER}.weight", Shard(INPUTS, (self._own,))
        yield from self.projection.shards()


@dataclass(frozen=True, slots=True)
class PerLayerInputSpec:
    """`size`: of a layer's embedding of a token."""

    size: int
    activation: Activation

    @property
    def kv(self) -> None:
        """See BlockSpec."""
        return

    @property
    def discrete(self) -> bool:
        """See BlockSpec."""
        return False

    def lora_sites(self, hidden_size: int) -> Mapping[str, LoraSite]:
        """See BlockSpec."""
        return {
            "layer_gate": LoraSite(GATE, "layer_gate", hidden_size, self.size),
            "layer_projection": LoraSite(PROJECTION, "layer_projection", self.size, hidden_size),
        }

    def of_rank(self, rank: int, size: int) -> "PerLayerInputSpec":
        """See BlockSpec. Every rank has all of it: it is small, and its norm is of all of its output."""
        return self

    def shards(self) -> Mapping[str, Shard]:
        """See BlockSpec."""
        return {}

    def build(self, context: BlockContext) -> "PerLayerInput":
        """See BlockSpec."""
        return PerLayerInput(self, context)


class PerLayerInput(UndividedBlock):
    """y = norm(W_out (act(x W_gate) * p)), with the layer's embedding p of the token."""

    kv, heads, capturable = None, 0, True

    def __init__(self, spec: PerLayerInputSpec, context: BlockContext) -> None:
        self.layer, self.prefix, hidden = context.layer, context.prefix, context.hidden_size
        self.gate = context.linear((f"{self.prefix}.{GATE}",), hidden, (spec.size,), bias=False)
        self.projection = context.linear((f"{self.prefix}.{PROJECTION}",), spec.size, (hidden,), bias=False)
        self.norm, self._act = context.norm(hidden), PLAIN[spec.activation]

    def __call__(self, x: Tensor, step: ForwardContext) -> Tensor:
        """See Block."""
        assert step.per_layer is not None
        gate = self._act(step.linear(self.gate, self.layer, "layer_gate", x))
        chosen = gate * step.per_layer[:, self.layer]
        return self.norm(step.linear(self.projection, self.layer, "layer_projection", chosen))

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """See Block."""
        yield from self.gate.tensors()
        yield from self.projection.tensors()
        yield from self.norm.tensors(f"{self.prefix}.post_per_layer_input_norm")

    def norms(self) -> Iterator[Norm]:
        """See Block."""
        yield self.norm

    def linears(self) -> Iterator[Linear]:
        """See Block."""
        yield self.gate
        yield self.projection

    def lora_linears(self) -> Iterator[tuple[tuple[str, ...], Linear]]:
        """See Block."""
        yield ("layer_gate",), self.gate
        yield ("layer_projection",), self.projection
