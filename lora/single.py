"""Single-threaded operations on an adapter's tensors, for reading and placing it.

Torch would split each of these small operations among its threads. While a model runs on the same cores,
every such operation would wait until each thread gets its turn: some 100 ms on a busy machine, and there are
hundreds of operations.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

AT_ONCE = 2**15  # elements; torch splits larger operations among its threads
_BITS = {2: (torch.int16, np.uint16, 0x7FFF), 4: (torch.int32, np.uint32, 0x7FFFFFFF)}


def magnitude(tensor: Tensor) -> float:
    """The largest magnitude in a non-empty float tensor; NaN or infinity if it has one.

    Without their sign, floats are ordered as their bits are, and NaN comes after infinity.
    """
    if tensor.element_size() not in _BITS or not tensor.is_floating_point():
        return float(tensor.abs().max())
    signed, unsigned, mask = _BITS[tensor.element_size()]
    bits: NDArray[Any] = tensor.contiguous().view(signed).numpy().view(unsigned)
    largest = int((bits & mask).max())
    return float(torch.tensor(largest, dtype=signed).view(tensor.dtype))


def transposed(tensor: Tensor) -> Tensor:
    """A contiguous copy of a matrix, transposed."""
    signed = _BITS[tensor.element_size()][0]
    copy = np.ascontiguousarray(tensor.contiguous().view(signed).numpy().T)
    return torch.from_numpy(copy).view(tensor.dtype)


def scaled(out: Tensor, source: Tensor, scaling: float = 1.0, gain: Tensor | None = None) -> None:
    """Fills a matrix with source * scaling * gain, computed in float32 and rounded once.

    out, source: [rows, width] on the CPU, of any float dtypes. gain: [width] float32.
    """
    plain = scaling == 1.0 and gain is None
    step = max(AT_ONCE // max(out.shape[1], 1), 1)
    for first in range(0, len(out), step):
        part = source[first : first + step]
        if not plain:
            part = part.float() * scaling
            if gain is not None:
                part *= gain
        out[first : first + step].copy_(part)
