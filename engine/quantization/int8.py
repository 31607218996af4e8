"""Eight bits per weight, and a scale per output.

A product multiplies integers, and the whole sum is multiplied by the output's scale. The CPU kernels round
inputs to 8 bits (`reference.round_inputs`). The rounding of a row depends on that row alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from personae.engine.quantization.base import LinearMethod, QuantizedMethod
from personae.engine.quantization.scaled import EightBitWeight

STEPS = 127  # per sign


@dataclass(frozen=True, slots=True)
class Int8Weight(EightBitWeight):
    """The nearest of 255 steps between minus and plus the largest value of an output's row. values: int8."""

    kind: ClassVar[str] = "int8"
    dtype: ClassVar[torch.dtype] = torch.int8

    def write(self, weight: Tensor) -> None:
        """See `QuantizedWeight`."""
        scales = weight.abs().amax(1, keepdim=True) / STEPS
        steps = (weight / scales).round_().nan_to_num_()  # a row of zeros has the scale 0
        self.values.copy_(steps.clamp_(-STEPS, STEPS))
        self.scales.copy_(scales)


class Int8(QuantizedMethod):
    """See `Int8Weight`."""

    kept = Int8Weight


METHODS = {Int8Weight.kind: Int8}


def scheme(names: Sequence[str]) -> type[LinearMethod]:
    """int8 for every module, including the output matrix."""
    return Int8
