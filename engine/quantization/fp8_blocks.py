"""E4M3 with a scale for each 128 inputs of an output, and activations likewise (W8A8).

Checkpoints have a scale for each block of 128 outputs and 128 inputs. Each output keeps its own copy, so
merged modules and the parts of ranks need not be whole blocks; that is 3 % more bytes. The product is torch's
scaled one, which cuBLAS computes on Hopper.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from personae.engine.quantization import FP8_BLOCK
from personae.engine.quantization.base import Product, QuantizedMethod
from personae.engine.quantization.fp8 import ALIGNED, to_fp8
from personae.engine.quantization.scaled import EightBitWeight
from personae.kernels.reference import FP8

HOPPER = 9  # cuBLAS has the product on no other generation
OLDEST_CUDA = (12, 9)
ROWS = 4  # of activations, in multiples: 16 bytes of scales


@dataclass(frozen=True, slots=True)
class BlockFp8Weight(EightBitWeight):
    """As `EightBitWeight`, with scales [outputs, inputs / 128]."""

    kind: ClassVar[str] = "fp8_blocks"
    dtype: ClassVar[torch.dtype] = FP8

    @classmethod
    def empty(cls, outputs: int, inputs: int, device: torch.device) -> Self:
        """A weight to be filled. inputs: a multiple of 128."""
        scales = torch.empty(outputs, inputs // FP8_BLOCK, device=device)
        return cls(inputs, scales, torch.empty(outputs, inputs, dtype=FP8, device=device))

    def write(self, weight: Tensor) -> None:
        """See `QuantizedWeight`."""
        values, scales = to_fp8(weight.view(-1, FP8_BLOCK))
        self.values.copy_(values.view(self.shape))
        self.scales.copy_(scales.view_as(self.scales))

    def read(self) -> Tensor:
        """See `QuantizedWeight`."""
        groups = self.values.float().view(*self.scales.shape, FP8_BLOCK)
        return (groups * self.scales.unsqueeze(2)).view(self.shape)


def multiplied(device: torch.device) -> bool:
    """Whether the device has a product with such weights."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    version = tuple(map(int, torch.version.cuda.split(".")[:2]))
    return torch.cuda.get_device_capability(device)[0] == HOPPER and version >= OLDEST_CUDA


class BlockFp8(QuantizedMethod):
    """See `BlockFp8Weight`. Where the shape has no product, the weight is made plain for each one, and
    activations stay as they are."""

    kept = BlockFp8Weight
    rounds_inputs = True

    weight: BlockFp8Weight

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(outputs, inputs, dtype, device)
        self._multiplies = multiplied(device) and outputs % ALIGNED == 0

    def finish(self, bias: Tensor | None) -> Product:
        """See `LinearMethod`: the values lie as torch's product likes them, the scales do from now on."""
        self.weight = BlockFp8Weight(
            self.weight.inputs, outputs_together(self.weight.scales), self.weight.values
        )
        return self

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `Product`."""
        if not self._multiplies or not len(x):
            return F.linear(x, self.plain(), bias)
        padded = F.pad(x, (0, 0, 0, -len(x) % ROWS))
        values, scales = to_fp8(padded.reshape(-1, FP8_BLOCK))
        each = ScalingType.BlockWise1x128
        y = scaled_mm(
            values.view(padded.shape),
            self.weight.values.t(),
            outputs_together(scales.view(len(padded), -1)),
            each,
            outputs_together(self.weight.scales),
            each,
            output_dtype=torch.bfloat16,
        )[: len(x)].to(self.dtype)
        return y if bias is None else y.add_(bias)


def outputs_together(scales: Tensor) -> Tensor:
    """The same [rows, groups], with the scales of a group next to one another, as cuBLAS reads them."""
    return scales.t().contiguous().t()


METHODS = {BlockFp8Weight.kind: BlockFp8}
