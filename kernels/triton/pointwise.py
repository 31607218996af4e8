"""Launches the pointwise kernels: norms, rotary embedding, activations, writes to the KV cache."""

from functools import cache

import torch
from torch import Tensor

from personae.kernels.reference import FP8, FP8_MAX
from personae.kernels.triton.device.pointwise import (
    act_and_mul_kernel,
    append_kv_kernel,
    rms_norm_kernel,
    rotary_kernel,
)
from personae.kernels.triton.launch import Launch
from personae.kernels.triton.sizes import ceil_div, power_of_two

ROTARY_HEADS = 4  # per program
GATE_BLOCK = 1024


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(s), s), where s = residual + x, or x without a residual.

    x: two or three dimensions, two with a residual; the last is contiguous.
    """
    size = x.shape[-1]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = x if residual is None else torch.empty_like(y)
    inner = x.shape[1] if x.dim() == 3 else 1
    rows = x.shape[0] * inner
    if rows:
        _rms_norm(size, residual is not None)(
            (rows, 1, 1),
            (x, x if residual is None else residual, weight, y, total),
            (
                x.stride(0),
                x.stride(1) if x.dim() == 3 else 0,
                0 if residual is None else residual.stride(0),
                inner,
                eps,
            ),
        )
    return y, total


@cache
def _rms_norm(size: int, add: bool) -> Launch:
    wide = power_of_two(size)
    return Launch(rms_norm_kernel, SIZE=size, WIDE=wide, ADD=add, num_warps=min(8, max(1, wide // 512)))


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """See `reference.rotary`. The last dimension is contiguous; heads and tokens may be strided."""
    tokens, q_heads, dim = q.shape
    kv_heads = k.shape[1]
    if tokens:
        _rotary(q_heads, q.stride(1), kv_heads, k.stride(1), dim // 2)(
            (tokens, ceil_div(q_heads, ROTARY_HEADS) + ceil_div(kv_heads, ROTARY_HEADS), 1),
            (q, k, positions, cos, sin),
            (q.stride(0), k.stride(0)),
        )


@cache
def _rotary(q_heads: int, q_head: int, k_heads: int, k_head: int, half: int) -> Launch:
    return Launch(
        rotary_kernel,
        Q_HEAD=q_head,
        K_HEAD=k_head,
        Q_HEADS=q_heads,
        K_HEADS=k_heads,
        HALF=half,
        WIDE=power_of_two(half),
        HEADS=ROTARY_HEADS,
        num_warps=1,
    )


def act_and_mul(x: Tensor, *, gelu: bool) -> Tensor:
    """See `reference.silu_and_mul` and `reference.gelu_and_mul`. Tokens may be strided."""
    tokens, size = x.shape[0], x.shape[1] // 2
    y = torch.empty(tokens, size, dtype=x.dtype, device=x.device)
    if tokens:
        _act_and_mul(gelu)((tokens, ceil_div(size, GATE_BLOCK), 1), (x, y), (x.stride(0), size))
    return y


@cache
def _act_and_mul(gelu: bool) -> Launch:
    return Launch(act_and_mul_kernel, GELU=gelu, BLOCK=GATE_BLOCK)


def append_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, write_index: Tensor) -> None:
    """See `reference.append_kv`. Heads are contiguous; tokens may be strided."""
    tokens, heads, dim = k.shape
    if tokens:
        _append_kv(heads, dim, k_cache.shape[2], k_cache.dtype is FP8)(
            (tokens, 1, 1),
            (k, v, k_cache, v_cache, write_index),
            (k.stride(0), v.stride(0), k_cache.stride(0)),
        )


@cache
def _append_kv(heads: int, dim: int, page: int, to_fp8: bool) -> Launch:
    return Launch(
        append_kv_kernel,
        HEADS=heads,
        DIM=dim,
        PAGE=page,
        WIDE=power_of_two(heads * dim),
        LARGEST=FP8_MAX if to_fp8 else 0.0,
    )
