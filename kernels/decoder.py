"""A whole forward pass in one call, where a device's backend has one; elsewhere the layers run in turn.

The backend takes over the weights: it lays them out as it likes, and the caller's may be freed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from personae.kernels.attention import AttentionBatch
from personae.kernels.quantized import QuantizedWeight
from personae.kernels.registry import optional
from personae.kernels.sgmv import RankTable, WorkList

Weight = Tensor | QuantizedWeight
"""Of a linear module: [outputs, inputs]."""


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """y = x weight^T + bias. weight: [outputs, inputs]; merged modules lie one after the other."""

    weight: Weight
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Norms are float32. qkv: q, k, v merged; gate_up: gate, up merged. `window`: None for full
    attention. `rope`: cos and sin, each [positions, pairs] float32; None where nothing is rotated."""

    attention_norm: Tensor
    qkv: LinearWeights
    qk_norms: tuple[Tensor, Tensor] | None
    o: LinearWeights
    mlp_norm: Tensor
    gate_up: LinearWeights
    down: LinearWeights
    window: int | None
    rope: tuple[Tensor, Tensor] | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A decoder as `engine/models/decoder.py` describes it."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    output: Weight
    heads: int
    kv_heads: int
    head_dim: int
    eps: float


@dataclass(frozen=True, slots=True)
class LoraStack:
    """A module's arenas of all layers: a [layers, rows, in], b [layers, rows, out]; see `kernels/sgmv.py`."""

    a: Tensor
    b: Tensor
    table: RankTable


@dataclass(frozen=True, slots=True)
class LoraStep:
    """The adapters of one step. stacks: by module, "q", "k", "v", "o", "gate", "up" and "down"."""

    stacks: Mapping[str, LoraStack]
    work: WorkList


class PackedLinear(Protocol):
    """A linear module whose weight lies as the backend likes it."""

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, inputs] -> [T, outputs]."""

    def plain(self) -> Tensor:
        """The weight as it was given, [outputs, inputs]: a copy, in bfloat16 if it was quantized."""


class FusedDecoder(Protocol):
    """Weights that were taken over. One thread at a time uses it."""

    @property
    def linears(self) -> tuple[tuple[PackedLinear, PackedLinear, PackedLinear, PackedLinear], ...]:
        """Each layer's qkv, o, gate_up and down, for whoever runs layers one by one."""

    @property
    def output(self) -> PackedLinear:
        """The output matrix."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Tensor,
        batch: AttentionBatch,
        lora: LoraStep | None,
        overlap: Callable[[], None] | None = None,
    ) -> Tensor:
        """tokens, positions: [T] int64; cache: [layers, 2, pages, kv_heads, page_size, D] -> [T, H] float32.

        Appends the tokens' keys and values; a row of the result has the same bits in any company. `overlap`
        is done by this thread while others have begun to compute; what it raises is raised in the end.
        """

    def logits(self, hidden: Tensor, logit_mask: Tensor | None = None) -> Tensor:
        """Rows of `forward`'s result [S, H] -> [S, V] float32, in memory that the next call writes again.

        needed: a bitmask [S, ceil(V / 32)] int32. Where a word of it is 0 the row's 32 logits may be
        anything: they are not computed, unless those of many rows are.
        """


def fuse(weights: DecoderWeights) -> FusedDecoder | None:
    """Hands the weights to the backend of their device; None, and nothing has changed, if it does not take
    this shape or dtype."""
    backend = optional("fuse", weights.embedding.device, weights.embedding.dtype)
    fused: FusedDecoder | None = None if backend is None else backend(weights)
    return fused


def pack_linear(linear: LinearWeights, dtype: torch.dtype) -> PackedLinear | None:
    """Hands a weight to the backend of its device, for products with activations of `dtype`; None if it has
    none. A row of such a product has the same bits in any company."""
    backend = optional("pack_linear", linear.weight.device, dtype)
    packed: PackedLinear | None = None if backend is None else backend(linear, dtype)
    return packed
