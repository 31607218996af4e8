"""Launches the sampling kernels, without waiting for the device."""

import numpy as np
import torch
from torch import Tensor

from personae.kernels.sampling import SamplingRows
from personae.kernels.triton.device.sampling import (
    draw_kernel,
    gather_kernel,
    greatest_kernel,
    weigh_kernel,
)
from personae.kernels.triton.device.sampling_filters import LEVELS
from personae.kernels.triton.sizes import ceil_div, power_of_two
from personae.kernels.upload import uploads

CHUNK = 1024  # logits that a program reads at once
MOST_CHUNKS = 512  # per row; one program reads a value of each
GATHERERS = 32  # programs that share the chunks of a row
TILE = 4096  # listed weights that a program reads at once


def choose(logits: Tensor, rows: SamplingRows, bitmask: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `reference.choose`. The rows of `logits` are contiguous and at most CHUNK * MOST_CHUNKS wide."""
    count, width = logits.shape
    device, chunks = logits.device, ceil_div(width, CHUNK)
    tokens = torch.empty(count, dtype=torch.int64, device=device)
    best = torch.empty(count, dtype=torch.float32, device=device)
    if not count:
        return tokens, best
    table, masks = _on_device(rows, bitmask, device)
    tops = torch.empty(count, chunks, dtype=torch.float32, device=device)
    ids = torch.empty(count, chunks, dtype=torch.int32, device=device)
    weights = torch.empty(count, chunks, dtype=torch.float32, device=device)
    sums = torch.empty(count, chunks, dtype=torch.float64, device=device)
    draws = bool(rows.temperature.any())
    filters = bool((((rows.top_k > 0) | (rows.top_p < 1)) & (rows.temperature > 0)).any())
    levels = (count, LEVELS.value, chunks) if filters else (1,)
    level_counts = torch.empty(levels, dtype=torch.int32, device=device)
    level_sums = torch.empty(levels, dtype=torch.float32, device=device)
    lists = torch.empty((count, width) if filters else (1,), dtype=torch.float32, device=device)
    narrowed = torch.empty(count, 4, dtype=torch.float64, device=device)
    stride, words = logits.stride(0), masks.shape[1]
    wide = {"CHUNK": CHUNK, "CHUNKS": power_of_two(chunks)}
    greatest_kernel[count, chunks](
        logits, table, masks, tops, ids, stride, count, words, width, CHUNK=CHUNK, num_warps=4
    )
    weigh_kernel[count, chunks if draws else 1](
        logits,
        table,
        masks,
        tops,
        ids,
        weights,
        sums,
        level_counts,
        level_sums,
        best,
        tokens,
        stride,
        count,
        words,
        width,
        chunks,
        num_warps=4,
        **wide,
    )
    if filters:
        chunks_each = ceil_div(chunks, GATHERERS)
        gather_kernel[count, ceil_div(chunks, chunks_each)](
            logits,
            table,
            sums,
            level_counts,
            level_sums,
            lists,
            narrowed,
            stride,
            count,
            width,
            chunks,
            chunks_each,
            BLOCK=32,
            num_warps=4,
            **wide,
        )
    if draws:
        draw_kernel[(count,)](
            logits,
            table,
            weights,
            sums,
            lists,
            narrowed,
            tokens,
            stride,
            count,
            width,
            chunks,
            TILE=TILE,
            TOGETHER=4,
            num_warps=16,
            **wide,
        )
    return tokens, best


def _on_device(rows: SamplingRows, bitmask: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Copies the parameters and masks to the device at once.

    Returns the parameters as one tensor, see `device/sampling.py`, and the masks that forbid any token, [at
    least 1, words] int32.
    """
    mask = np.full(len(rows.positions), -1, np.int64)
    words = np.zeros((1, 1), np.int32)
    if bitmask is not None:
        every = bitmask.numpy()
        masked = np.flatnonzero((every != -1).any(1))
        if len(masked):
            mask[masked] = np.arange(len(masked))
            words = every[masked]
    table = (
        rows.streams.view(np.int64),
        rows.positions,
        rows.top_k,
        rows.top_p.view(np.int64),
        rows.temperature.astype(np.float64).view(np.int64),
        rows.min_p.astype(np.float64).view(np.int64),
        mask,
    )
    found, masks = uploads((np.stack(table), words), device)
    return found, masks
