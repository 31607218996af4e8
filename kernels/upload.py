"""Copies of host arrays to a device.

A GPU copies asynchronously only from pinned memory. From other memory the driver makes a copy first, and may
wait for all earlier work of the device. So arrays go through pinned memory, which torch keeps until the copy
is done. The arrays of a step go together, because a copy costs the host about 10 us, whatever its size.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16  # bytes; kernels are compiled for pointers that are multiples of it


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """`array` on `device`, without waiting for the copy. On the CPU it shares the array's memory; elsewhere
    the array may be changed as soon as this returns."""
    return uploads((array,), device)[0]


def uploads(arrays: Sequence[NDArray[np.generic]], device: torch.device) -> tuple[Tensor, ...]:
    """As `upload`, for several arrays in one copy. Each begins at a multiple of 16 bytes and is
    contiguous."""
    arrays = list(map(np.ascontiguousarray, arrays))
    if device.type == "cpu":
        return tuple(map(torch.from_numpy, arrays))
    if device.type != "cuda":
        return tuple(torch.from_numpy(array).to(device) for array in arrays)
    ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
    host = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=True)
    memory = host.numpy()
    starts = [0, *ends[:-1]]
    for start, array in zip(starts, arrays, strict=True):
        memory[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    there = host.to(device, non_blocking=True)
    return tuple(
        there[start : start + array.nbytes].view(_DTYPES[array.dtype.type]).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    )


_DTYPES = {
    np.int32: torch.int32,
    np.int64: torch.int64,
    np.float32: torch.float32,
    np.float64: torch.float64,
}
