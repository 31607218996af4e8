"""Launches the kernel of attention over latent vectors, without waiting for the device."""

import torch
from torch import Tensor

from personae.kernels.attention import SHORTEST_SPLIT
from personae.kernels.latent_attention import LatentPlan
from personae.kernels.triton.attention import LOG2_E
from personae.kernels.triton.device.attention import merge_kernel
from personae.kernels.triton.device.latent_attention import latent_kernel
from personae.kernels.triton.launch import launch
from personae.kernels.triton.sizes import Gpu, ceil_div, power_of_two

HEADS_AT_ONCE = 16  # the fewest rows of a matrix instruction; more would spill the sums of 512 numbers each


def latent_attention(q: Tensor, cache: Tensor, plan: LatentPlan, scale: float, gpu: Gpu) -> Tensor:
    """See `reference_latent.latent_attention`. q is contiguous. What it has for tokens of prompts means
    nothing."""
    tokens, heads, width = q.shape
    blocks, rope = ceil_div(heads, HEADS_AT_ONCE), width - plan.latent
    # All tokens' programs fill the device about twice, so the memory for parts is bounded.
    most = power_of_two(max(1, 2 * gpu.processors // (tokens * blocks)))
    splits = max(1, min(ceil_div(plan.batch.max_kv, SHORTEST_SPLIT), most))
    out = q.new_empty(tokens, heads, plan.latent)
    parts = tokens * splits * heads if splits > 1 else 1
    sums, stats = (
        torch.empty(parts * size, dtype=torch.float32, device=q.device) for size in (plan.latent, 2)
    )
    row, seen = plan.by_token
    table = plan.batch.page_table
    narrow = q.dtype is not torch.float32
    wide, keys = max(16, power_of_two(plan.latent)), 32 if narrow else 16
    attend = launch(
        latent_kernel,
        HEADS=heads,
        LATENT=plan.latent,
        LATENT_WIDE=wide,
        ROPE=rope,
        ROPE_WIDE=max(16, power_of_two(rope)),
        PAGE=cache.shape[2],
        ROWS=HEADS_AT_ONCE,
        KEYS=keys,
        SHORTEST=SHORTEST_SPLIT,
        num_warps=8 if wide > 256 else 4,
        num_stages=2 if narrow else 1,
    )
    attend(
        (tokens, blocks, splits),
        (q, cache, out, sums, stats, row, seen, table),
        (q.stride(0), table.stride(0), cache.stride(0), scale * LOG2_E, splits),
    )
    if splits > 1:
        merge = launch(
            merge_kernel,
            SPLITS=power_of_two(splits),
            num_warps=2,
            HEADS=heads,
            DIM=plan.latent,
            WIDE=wide,
            KEYS=keys,
            SHORTEST=SHORTEST_SPLIT,
            WINDOWED=False,
        )
        merge((tokens, heads, 1), (out, sums, stats, plan.numbers, seen), (0, 1, splits))
    return out
