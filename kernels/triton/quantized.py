"""Launches the products with weights in 8 and 4 bits, without waiting for the device."""

import torch
from torch import Tensor

from personae.kernels.decoder import LinearWeights
from personae.kernels.quantized import QuantizedWeight
from personae.kernels.triton.device.quantized import int4_linear_kernel, int8_linear_kernel
from personae.kernels.triton.sizes import ceil_div

KERNELS = {"int8": int8_linear_kernel, "int4": int4_linear_kernel}
"""By `QuantizedWeight.kind`."""
FEW = 16  # rows up to which a program takes a narrow block of outputs, so that all multiprocessors read


class TritonLinear:
    """A linear module whose weight stays in 8 or 4 bits, and is widened in registers as it is multiplied.

    weight: of a kind in `KERNELS`. A row's bits depend on the number of rows only through `FEW`.
    """

    def __init__(self, linear: LinearWeights, dtype: torch.dtype) -> None:
        assert isinstance(linear.weight, QuantizedWeight)
        self.weight, self.bias, self.dtype = linear.weight, linear.bias, dtype
        scales, *stored = self.weight.tensors()
        self._kernel, self._tensors = KERNELS[self.weight.kind], (*stored, scales)
        # In 4 bits a row has whole groups, the last one padded.
        self._sizes = (*self.weight.shape, *(steps.shape[1] for steps in stored[1:]))

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, inputs] -> [T, outputs]. The rows of x may be strided."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        rows, outputs = x.shape[0], self._sizes[0]
        y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
        if not rows:
            return y
        plain = x.dtype is torch.float32  # which has no tensor cores, and whose large tiles would spill
        tile = 16 if rows <= FEW or plain else 64
        columns = 32 if tile == 16 else 64
        self._kernel[ceil_div(outputs, columns), ceil_div(rows, tile)](
            x,
            *self._tensors,
            self._tensors[-1] if self.bias is None else self.bias,
            y,
            rows,
            x.stride(0),
            *self._sizes,
            BIAS=self.bias is not None,
            ROWS=tile,
            COLUMNS=columns,
            DEPTH=32 if plain else 128 if tile == 16 else 64,
            num_warps=4,
            num_stages=3 if tile == 16 else 1,  # see `sizes.FENCES`: with one stage no copy is in flight
        )
        return y

    def plain(self) -> Tensor:
        """See `PackedLinear`."""
        return self.weight.plain(self.dtype)


def pack_linear(linear: LinearWeights, dtype: torch.dtype) -> TritonLinear | None:
    """See `kernels.decoder.pack_linear`: weights in 8 and 4 bits."""
    known = isinstance(linear.weight, QuantizedWeight) and linear.weight.kind in KERNELS
    return TritonLinear(linear, dtype) if known else None
