"""Launches the kernel of the experts' products, without waiting for the device."""

import torch
from torch import Tensor

from personae.kernels.triton.device.moe import expert_linear_kernel
from personae.kernels.triton.sizes import FENCES, ceil_div, power_of_two

COLUMNS = 64
DEPTH = 64


def expert_linear(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    """See `reference.expert_linear`. Inputs are contiguous; rows may be strided."""
    rows, (experts, outputs, inputs) = x.shape[0], weight.shape
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    tile = 16 if rows <= 16 * experts else 64  # with few rows an expert has at most about one tile
    if x.dtype is torch.float32:
        tile = 16  # full float32 has no tensor cores, and its large tiles would spill registers
    if rows:
        expert_linear_kernel[rows // tile + experts, ceil_div(outputs, COLUMNS)](
            x,
            weight,
            y,
            starts,
            experts,
            x.stride(0),
            outputs,
            inputs,
            EXPERTS=power_of_two(experts),
            ROWS=tile,
            COLUMNS=COLUMNS,
            DEPTH=DEPTH if x.dtype is not torch.float32 else 32,
            num_warps=4,
            # See `attention.tile_for`. Tiles of 16 rows are too small for Hopper's instructions.
            num_stages=3 if x.dtype is torch.bfloat16 and (FENCES or tile < 64) else 1,
        )
    return y
