"""Arrays of the host on their way to a device.

A GPU copies by itself only from memory that is pinned: from any other the driver copies first, and may wait
with that until the device has done all earlier work. So arrays go through pinned memory, which torch
keeps until they have arrived, and those of a step go together: a copy costs the host some 10 us, whatever its
size.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16  # bytes: kernels are compiled for pointers that are multiples of it


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """`array` on `device`, without waiting for it. On the CPU it is the array's own memory; elsewhere the
    array may be changed as soon as this returns."""
    return uploads((array,), device)[0]


def uploads(arrays: Sequence[NDArray[np.generic]], device: torch.device) -> tuple[Tensor, ...]:
    """As `upload`, in one copy. Each begins on a multiple of 16 bytes and is contiguous."""
    arrays = [np.ascontiguousarray(array) for array in arrays]
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
