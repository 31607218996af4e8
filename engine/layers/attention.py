"""Self-attention of one layer, over the paged cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from personae.engine.config import ModelConfig
from personae.engine.layers.linear import Linear, MakeLinear
from personae.engine.layers.norm import RMSNorm
from personae.engine.layers.step import ForwardContext
from personae.kernels.attention import append_kv
from personae.kernels.decoder import Weight
from personae.kernels.rotary import rotary


class Attention:
    """q, k, v = x W_qkv; heads rotated, keys and values appended to the cache; the heads' mix times W_o.

    rope: cos and sin, [positions, pairs] float32, indexed by position; None for a layer that rotates nothing.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        prefix: str,
        rope: tuple[Tensor, Tensor] | None,
        make: MakeLinear,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shapes, names = config.linear_shapes, ("qkv",) if config.merged else tuple("qkv")
        self.layer = layer
        self.head_dim = config.head_dim
        self.scale = config.attention_scale or config.head_dim**-0.5
        self.rope = rope
        self.window = config.windows[layer]
        self.sizes = [shapes[name][1] for name in "qkv"]
        qkv = tuple(f"{prefix}.{name}_proj" for name in names)
        self.qkv = make(qkv, config.hidden_size, tuple(self.sizes), bias=config.qkv_bias)
        self.o = make((f"{prefix}.o_proj",), shapes["o"][0], (shapes["o"][1],), bias=config.o_bias)
        self.prefix = prefix
        self.qk_norms: tuple[RMSNorm, RMSNorm] | None = None
        if config.qk_norm is not None:
            widths = [config.head_dim] * 2 if config.qk_norm == "head" else self.sizes[:2]
            q_norm, k_norm = (
                RMSNorm(width, config.eps, dtype=dtype, device=device, offset=config.norm_offset)
                for width in widths
            )
            self.qk_norms = q_norm, k_norm
        self._rotary, self._append_kv = rotary.on(device, dtype), append_kv.on(device, dtype)

    def __call__(self, x: Tensor, cache: tuple[Tensor, Tensor], step: ForwardContext) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        q, k, v = torch.split(step.linear(self.qkv, self.layer, "qkv", x), self.sizes, dim=-1)
        if self.qk_norms is not None:
            # Each head by itself, or all of them at once.
            q, k = (
                norm(part.view(*part.shape[:1], -1, norm.width)).flatten(1)
                for norm, part in zip(self.qk_norms, (q, k), strict=True)
            )
        q, k, v = (part.view(x.shape[0], -1, self.head_dim) for part in (q, k, v))
        if self.rope is not None:
            cos, sin = self.rope
            turned = 2 * cos.shape[1]
            self._rotary(q[..., :turned], k[..., :turned], step.positions, cos, sin)
        self._append_kv(k, v, *cache, step.batch.write_index)
        mixed = step.attend(q, *cache, self.scale, self.window).flatten(1)
        return step.linear(self.o, self.layer, "o", mixed)

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """(checkpoint name, the view to fill)."""
        yield from self.qkv.tensors()
        yield from self.o.tensors()
        if self.qk_norms is not None:
            yield f"{self.prefix}.q_norm.weight", self.qk_norms[0].weight
            yield f"{self.prefix}.k_norm.weight", self.qk_norms[1].weight

    def linears(self) -> Iterator[Linear]:
        """The linear modules."""
        yield self.qkv
        yield self.o
