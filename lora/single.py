"""Single-threaded operations on an adapter's tensors, for reading and placing it.

Torch would split each of these small operations among its threads. While a model runs on the same cores,
every such operation would wait until each thread gets its turn: some 100 ms on a busy machine, and there are
hundreds of operations.
"""

import struct
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

AT_ONCE = 2**15  # elements; torch splits larger operations among its threads
_SIGNED = {2: torch.int16, 4: torch.int32}
_VALUE = {torch.float16: ("<H", "<e", 0), torch.bfloat16: ("<I", "<f", 16), torch.float32: ("<I", "<f", 0)}
"""By dtype: how the struct module writes its bits, how it reads the value, and how far they are shifted."""

_FLOAT8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).bfloat16().view(torch.uint8).numpy()
_LOW, _HIGH = _FLOAT8[0::2].tobytes(), _FLOAT8[1::2].tobytes()


def magnitude(tensor: Tensor) -> float:
    """The largest magnitude in a non-empty float tensor; NaN or infinity if it has one.

    Without their sign, floats are ordered as their bits are, and NaN comes after infinity.
    """
    if tensor.dtype not in _VALUE:
        return float(tensor.abs().max())
    signed = _SIGNED[tensor.element_size()]
    bits: NDArray[Any] = tensor.contiguous().view(signed).numpy()
    largest = int((bits & torch.iinfo(signed).max).max())
    stored, read, shift = _VALUE[tensor.dtype]
    return float(struct.unpack(read, struct.pack(stored, largest << shift))[0])


def from_float8(data: bytearray) -> Tensor:
    """The bfloat16 values of float8_e4m3fn numbers, [n]. They are looked up, because torch's conversion takes
    several times as long."""
    found = np.empty((len(data), 2), np.uint8)
    found[:, 0] = np.frombuffer(data.translate(_LOW), np.uint8)
    found[:, 1] = np.frombuffer(data.translate(_HIGH), np.uint8)
    return torch.from_numpy(found.reshape(-1)).view(torch.bfloat16)


def transposed(tensor: Tensor) -> Tensor:
    """A contiguous copy of a matrix, transposed."""
    signed = _SIGNED[tensor.element_size()]
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
