"""Eight bits per weight, and a scale per output.

A product multiplies integers, which bfloat16 represents exactly, and the whole sum is multiplied by the
output's scale. The rounding of a row depends on that row alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from personae.engine.quantization.base import LinearMethod, QuantizedMethod
from personae.engine.quantization.scaled import ScaledWeight

STEPS = 127  # per sign


@dataclass(frozen=True, slots=True)
class Int8Weight(ScaledWeight):
    """W = values * scales: the nearest of 255 steps between minus and plus the largest value of an output's
    row.

    values: [outputs, inputs] int8.
    """

    kind: ClassVar[str] = "int8"

    values: Tensor

    @classmethod
    def empty(cls, outputs: int, inputs: int, device: torch.device) -> "Int8Weight":
        """A weight to be filled."""
        values = torch.empty(outputs, inputs, dtype=torch.int8, device=device)
        return cls(inputs, torch.empty(outputs, 1, device=device), values)

    def write(self, weight: Tensor) -> None:
        """See `QuantizedWeight`."""
        scales = weight.abs().amax(1, keepdim=True) / STEPS
        steps = (weight / scales).round_().nan_to_num_()  # a row of zeros has the scale 0
        self.values.copy_(steps.clamp_(-STEPS, STEPS))
        self.scales.copy_(scales)

    def read(self) -> Tensor:
        """See `QuantizedWeight`."""
        return self.values * self.scales


class Int8(QuantizedMethod):
    """See `Int8Weight`."""

    kept = Int8Weight


def scheme(names: Sequence[str]) -> type[LinearMethod]:
    """int8 for every module, including the output matrix."""
    return Int8
