"""What a small model's training on a CPU spends its time on, made cheap.

Backward passes are written by hand for three operations. Attention keeps its probabilities: at a few
hundred tokens a row they fit in the cache, and torch's flash kernel has a slow backward pass on CPUs.

Root-mean-square norm: with r = (mean(x^2) + eps)^(-1/2) and n = r x, the output is y = w n, and for a
gradient g of y
    dx = r (w g - n mean(w g n)),   dw = sum over rows of g n.
Rotary embedding is a rotation: its backward pass is the rotation by the negative angle.
Attention: with P = softmax(c q k^T + causal), o = P v, and D = P (g v^T - rowsum(P g v^T)) for a gradient g,
    dq = c D k,   dk = c D^T q,   dv = P^T g.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.models.qwen3 import modeling_qwen3

ATTENTION = "causal_products"  # the name under which transformers finds `attend`


class RmsNorm(torch.autograd.Function):
    """y = w x / sqrt(mean(x^2) + eps) over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Keeps the normalised x and its scale."""
        scale = (
            torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        )
        normed = x * scale
        ctx.save_for_backward(normed, weight, scale)
        output: Tensor = normed * weight
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """See the module's equation."""
        normed, weight, scale = ctx.saved_tensors
        product = gradient * normed
        dot = (product @ weight).div_(-normed.shape[-1]).unsqueeze(-1)
        return torch.addcmul(gradient * weight, normed, dot).mul_(scale), product.flatten(0, -2).sum(0), None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half = x.shape[-1] // 2
    turned = x * cos
    turned[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-sign)
    turned[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return turned


class Rotate(torch.autograd.Function):
    """Half-split rotary embedding of `[..., head_dim]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turns by the angle."""
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Turns back."""
        cos, sin = ctx.saved_tensors
        return _turn(gradient, cos, sin, -1), None, None


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    normed: Tensor = RmsNorm.apply(hidden_states, self.weight, self.variance_epsilon)  # type: ignore[no-untyped-call]  # torch
    return normed


def _rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return Rotate.apply(q, cos, sin), Rotate.apply(k, cos, sin)  # type: ignore[no-untyped-call]  # torch leaves it untyped


@functools.cache
def _future(length: int, heads: int, dtype: torch.dtype) -> Tensor:
    """`[heads * length, length]`: -inf where a row may not look."""
    return torch.full((length, length), -torch.inf, dtype=dtype).triu_(1).repeat(heads, 1)


class FusedAttention(torch.autograd.Function):
    """Causal attention of query heads stacked by group: `[rows, groups, heads a group * length, size]`."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Keeps the probabilities."""
        length = key.shape[2]
        scores = query @ key.mT
        scores.mul_(scale).add_(_future(length, query.shape[2] // length, scores.dtype).to(scores.device))
        shares = scores.softmax(-1)
        ctx.save_for_backward(query, key, value, shares)
        ctx.scale = scale
        mixed: Tensor = shares @ value
        return mixed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """See the module's equation."""
        query, key, value, shares = ctx.saved_tensors
        to_scores = torch._softmax_backward_data(gradient @ value.mT, shares, -1, shares.dtype)
        to_scores.mul_(ctx.scale)
        return to_scores @ key, to_scores.mT @ query, shares.mT @ gradient, None


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention as transformers calls it: query `[rows, heads, length, size]`, key and value
    `[rows, groups, length, size]`; the result is `[rows, length, heads, size]`."""
    rows, heads, length, size = query.shape
    stacked = query.reshape(rows, key.shape[1], -1, size)
    mixed: Tensor = FusedAttention.apply(stacked, key, value, scaling)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return mixed.reshape(rows, heads, length, size).transpose(1, 2), None


def install() -> None:
    """Makes transformers' Qwen3 use them in this process; the results are the same."""
    AttentionInterface.register(ATTENTION, attend)
    modeling_qwen3.Qwen3RMSNorm.forward = _norm
    modeling_qwen3.apply_rotary_pos_emb = _rotary
