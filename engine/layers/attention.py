"""Self-attention of one layer, over the paged cache."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from personae.engine.layers.block import BlockContext, KVSpec
from personae.engine.layers.linear import Linear
from personae.engine.layers.norm import RMSNorm
from personae.engine.layers.rotary import RopeConfig
from personae.engine.layers.step import ForwardContext
from personae.kernels.attention import append_kv
from personae.kernels.decoder import Weight
from personae.kernels.rotary import rotary
from personae.lora.sites import LoraSite, sites

QkNorm = Literal["head", "all"]  # over each head, or over all heads of a token together


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """`heads` query heads share `kv_heads` keys and values.

    `window`: a query sees itself and the `window - 1` tokens before it; None for all. `rope`: None for a
    layer without rotary embedding. `scale`: of scores, None means 1 / sqrt(head_dim). `merged`: the
    checkpoint has q, k and v as one tensor. `inputs`: the width of the input, None means the hidden size.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    rope: RopeConfig | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QkNorm | None = None
    scale: float | None = None
    merged: bool = False
    inputs: int | None = None

    @property
    def kv(self) -> KVSpec:
        """See BlockSpec."""
        return KVSpec(self.kv_heads, self.head_dim)

    @property
    def widths(self) -> tuple[int, int, int]:
        """The widths of q, k and v."""
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim

    @property
    def discrete(self) -> bool:
        """See BlockSpec."""
        return False

    def lora_sites(self, hidden_size: int) -> Mapping[str, LoraSite]:
        """See BlockSpec."""
        sizes = {key: (hidden_size, width) for key, width in zip("qkv", self.widths, strict=True)}
        return sites({**sizes, "o": (self.widths[0], hidden_size)}, merged=self.merged)

    def build(self, context: BlockContext) -> "Attention":
        """See BlockSpec."""
        return Attention(self, context)


class Attention:
    """q, k, v = x W_qkv. The heads are rotated, k and v are appended to the cache, and attention's result is
    multiplied by W_o."""

    capturable = True

    def __init__(self, spec: AttentionSpec, context: BlockContext) -> None:
        device, dtype = context.device, context.dtype
        names = ("qkv",) if spec.merged else tuple("qkv")
        self.prefix = f"{context.prefix}.self_attn"
        self.spec, self.layer = spec, context.layer
        self.kv, self.heads, self.sizes = spec.kv, spec.heads, list(spec.widths)
        self.scale = spec.scale or spec.head_dim**-0.5
        self.rope = context.rope(spec.rope, spec.head_dim) if spec.rope else None
        qkv = tuple(f"{self.prefix}.{name}_proj" for name in names)
        self.qkv = context.linear(qkv, spec.inputs or context.hidden_size, spec.widths, bias=spec.qkv_bias)
        self.o = context.linear(
            (f"{self.prefix}.o_proj",), spec.widths[0], (context.hidden_size,), bias=spec.o_bias
        )
        self.qk_norms: tuple[RMSNorm, RMSNorm] | None = None
        if spec.qk_norm is not None:
            q, k, _ = (spec.head_dim,) * 3 if spec.qk_norm == "head" else spec.widths
            self.qk_norms = context.norm(q), context.norm(k)
        self._rotary, self._append_kv = rotary.on(device, dtype), append_kv.on(device, dtype)

    def __call__(self, x: Tensor, step: ForwardContext) -> Tensor:
        """See Block."""
        cache, attend = step.caches[self.layer], step.attend[self.layer]
        q, k, v = torch.split(step.linear(self.qkv, self.layer, "qkv", x), self.sizes, dim=-1)
        if self.qk_norms is not None:
            # Each head alone, or all heads together.
            q, k = (
                norm(part.view(*part.shape[:1], -1, norm.width)).flatten(1)
                for norm, part in zip(self.qk_norms, (q, k), strict=True)
            )
        q, k, v = (part.view(x.shape[0], -1, self.kv.head_dim) for part in (q, k, v))
        if self.rope is not None:
            cos, sin = self.rope
            turned = 2 * cos.shape[1]
            self._rotary(q[..., :turned], k[..., :turned], step.positions, cos, sin)
        self._append_kv(k, v, *cache, step.batch.write_index)
        mixed = attend(q, *cache, self.scale, self.spec.window).flatten(1)
        return step.linear(self.o, self.layer, "o", mixed)

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """See Block."""
        yield from self.qkv.tensors()
        yield from self.o.tensors()
        if self.qk_norms is not None:
            yield f"{self.prefix}.q_norm.weight", self.qk_norms[0].weight
            yield f"{self.prefix}.k_norm.weight", self.qk_norms[1].weight

    def norms(self) -> Iterator[RMSNorm]:
        """See Block."""
        yield from self.qk_norms or ()

    def linears(self) -> Iterator[Linear]:
        """See Block."""
        yield self.qkv
        yield self.o

    def lora_linears(self) -> Iterator[tuple[tuple[str, ...], Linear]]:
        """See Block."""
        yield ("q", "k", "v"), self.qkv
        yield ("o",), self.o
