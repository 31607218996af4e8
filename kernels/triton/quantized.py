"""Launches the products with weights in 8 and 4 bits, without waiting for the device."""

import torch
from torch import Tensor

from personae.kernels.decoder import LinearWeights, PackedLinear
from personae.kernels.quantized import QuantizedWeight
from personae.kernels.triton.blocks import LAYOUTS, BlockLinear
from personae.kernels.triton.device.quantized import int4_linear_kernel, int8_linear_kernel
from personae.kernels.triton.sizes import ceil_div, product_tile

KERNELS = {"int8": int8_linear_kernel, "int4": int4_linear_kernel}
"""By `QuantizedWeight.kind`."""


class TritonLinear:
    """A linear module whose weight stays in 8 or 4 bits, and is widened in registers as it is multiplied.

    weight: of a kind in `KERNELS`. A row's bits depend on the number of rows only through `sizes.FEW`.
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
        tile = product_tile(rows, x.dtype)
        self._kernel[ceil_div(outputs, tile.columns), ceil_div(rows, tile.rows)](
            x,
            *self._tensors,
            self._tensors[-1] if self.bias is None else self.bias,
            y,
            rows,
            x.stride(0),
            *self._sizes,
            BIAS=self.bias is not None,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            num_warps=4,
            num_stages=tile.stages,
        )
        return y

    def plain(self) -> Tensor:
        """See `PackedLinear`."""
        return self.weight.plain(self.dtype)


def pack_linear(linear: LinearWeights, dtype: torch.dtype) -> PackedLinear | None:
    """See `kernels.decoder.pack_linear`: weights in 8 and 4 bits, and in GGUF's blocks."""
    if not isinstance(linear.weight, QuantizedWeight):
        return None
    if linear.weight.kind in LAYOUTS:
        return BlockLinear(linear, dtype)
    return TritonLinear(linear, dtype) if linear.weight.kind in KERNELS else None
