"""Large tensors that live long."""

from math import prod

import numpy as np
import torch
from torch import Tensor


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On the CPU they take memory when it is first written, where the system can on huge pages.

    `torch.zeros` writes all of it at once, on small pages; NumPy asks for huge ones, which makes reading a
    tensor from end to end, as each step does, measurably faster.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    unwritten = np.zeros(prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(unwritten).view(dtype).view(shape)
