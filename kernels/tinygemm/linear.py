"""Weights of four bits in the order of tinygemm, torch's kernel for products with them.

The kernel computes (nibble - 8) * scale + shift in bfloat16 and sums in float32. Here shifts are 0. A row's
sum has the same order whatever the other rows are.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from personae.kernels.decoder import LinearWeights, PackedLinear
from personae.kernels.quantized import QuantizedWeight
from personae.kernels.triton.blocks import repack

PACK = torch.ops.aten._convert_weight_to_int4pack
MULTIPLY = torch.ops.aten._weight_int4pack_mm
KIND = "Q4_0"
GROUPS = (256, 128, 64, 32)  # inputs that may share a scale
TILES = (8, 4, 2)  # tiles of 16 inputs that may lie together: the more, the wider a load
OUTPUTS = 8  # of a tile
_CHUNK = 1024  # inputs that are made plain at a time


class TinyGemmLinear:
    """A linear module whose weight stays in four bits.

    packed: as torch packs it. scales: [inputs / group, outputs, 2] bfloat16, scales and shifts.
    """

    def __init__(self, packed: Tensor, scales: Tensor, inputs: int, bias: Tensor | None) -> None:
        self._packed, self._scales, self._inputs, self.bias = packed, scales, inputs, bias
        self._group = inputs // len(scales)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, inputs] bfloat16 -> [T, outputs]."""
        y = self._product(x) if len(x) else x.new_empty(0, self._scales.shape[1])
        return y if self.bias is None else y.add_(self.bias)

    def plain(self) -> Tensor:
        """See `PackedLinear`: products with the rows of the identity, which are exact."""
        outputs, inputs = self._scales.shape[1], self._inputs
        made = torch.empty(outputs, inputs, dtype=torch.bfloat16, device=self._scales.device)
        for first in range(0, inputs, _CHUNK):
            rows = torch.zeros(
                min(_CHUNK, inputs - first), inputs, dtype=torch.bfloat16, device=self._scales.device
            )
            rows.diagonal(first).fill_(1)
            made[:, first : first + len(rows)] = self._product(rows).T
        return made

    def _product(self, x: Tensor) -> Tensor:
        y: Tensor = MULTIPLY(x.contiguous(), self._packed, self._group, self._scales)
        return y


def pack_linear(
    linear: LinearWeights, dtype: torch.dtype, others: Callable[[LinearWeights, torch.dtype], PackedLinear]
) -> PackedLinear | None:
    """See `kernels.decoder.pack_linear`. The kernel takes blocks of four bits without a least value if their
    scales are exact in bfloat16 and the shape is one of whole tiles. `others` takes the rest."""
    weight = linear.weight
    if isinstance(weight, QuantizedWeight) and weight.kind == KIND:
        (rows,) = weight.tensors()
        outputs, inputs = weight.shape
        tiles = next((count for count in TILES if inputs % (16 * count) == 0), None)
        repacked = repack(KIND, rows, inputs)
        scales = repacked.scales.bfloat16()
        if tiles is not None and outputs % OUTPUTS == 0 and scales.float().equal(repacked.scales.float()):
            swapped = repacked.levels << 4 | repacked.levels >> 4  # an even input in the upper half of a byte
            packed: Tensor = PACK(swapped, tiles)
            return TinyGemmLinear(packed, _coarsest(scales, inputs), inputs, linear.bias)
    return others(linear, dtype)


def _coarsest(scales: Tensor, inputs: int) -> Tensor:
    """Scales of 32 inputs [outputs, inputs / 32] -> those of the largest groups that share one, as
    `TinyGemmLinear` has them."""
    for group in GROUPS:
        if inputs % group == 0:
            whole = scales.view(len(scales), -1, group // GROUPS[-1])
            if whole.eq(whole[:, :, :1]).all():
                break
    found = whole[:, :, 0].T
    return torch.stack((found, torch.zeros_like(found)), 2).contiguous()
