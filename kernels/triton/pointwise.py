"""Launches the pointwise kernels: norms, rotary embedding, activations, writes to the KV cache."""

import torch
from torch import Tensor

from personae.kernels.reference import FP8, FP8_MAX
from personae.kernels.triton.device.pointwise import (
    act_and_mul_kernel,
    append_kv_kernel,
    rms_norm_kernel,
    rotary_kernel,
)
from personae.kernels.triton.sizes import ceil_div, power_of_two

ROTARY_HEADS = 4  # per program
GATE_BLOCK = 1024


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(s), s), where s = residual + x, or x without a residual.

    x: two or three dimensions, two with a residual; the last is contiguous.
    """
    size = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inner = x.shape[1] if x.dim() == 3 else 1
    rows = x.shape[0] * inner
    if rows:
        rms_norm_kernel[(rows,)](
            x,
            x if residual is None else residual,
            weight,
            y,
            total,
            x.stride(0),
            x.stride(1) if x.dim() == 3 else 0,
            0 if residual is None else residual.stride(0),
            inner,
            eps,
            SIZE=size,
            WIDE=power_of_two(size),
            ADD=residual is not None,
            num_warps=min(8, max(1, power_of_two(size) // 512)),
        )
    return y, total


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """See `reference.rotary`. The last dimension is contiguous; heads and tokens may be strided."""
    tokens, q_heads, dim = q.shape
    blocks = ceil_div(q_heads, ROTARY_HEADS) + ceil_div(k.shape[1], ROTARY_HEADS)
    if tokens:
        rotary_kernel[tokens, blocks](
            q,
            k,
            positions,
            cos,
            sin,
            q.stride(0),
            k.stride(0),
            Q_HEAD=q.stride(1),
            K_HEAD=k.stride(1),
            Q_HEADS=q_heads,
            K_HEADS=k.shape[1],
            HALF=dim // 2,
            WIDE=power_of_two(dim // 2),
            HEADS=ROTARY_HEADS,
            num_warps=1,
        )


def act_and_mul(x: Tensor, *, gelu: bool) -> Tensor:
    """See `reference.silu_and_mul` and `reference.gelu_and_mul`. Tokens may be strided."""
    tokens, size = x.shape[0], x.shape[1] // 2
    y = torch.empty(tokens, size, dtype=x.dtype, device=x.device)
    if tokens:
        act_and_mul_kernel[tokens, ceil_div(size, GATE_BLOCK)](
            x, y, x.stride(0), size, GELU=gelu, BLOCK=GATE_BLOCK
        )
    return y


def append_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, write_index: Tensor) -> None:
    """See `reference.append_kv`. Heads are contiguous; tokens may be strided."""
    tokens, heads, dim = k.shape
    if tokens:
        append_kv_kernel[(tokens,)](
            k,
            v,
            k_cache,
            v_cache,
            write_index,
            k.stride(0),
            v.stride(0),
            k_cache.stride(0),
            HEADS=heads,
            DIM=dim,
            PAGE=k_cache.shape[2],
            WIDE=power_of_two(heads * dim),
            LARGEST=FP8_MAX if k_cache.dtype is FP8 else 0.0,
        )
