"""What formats with a scale per output, or per block of an output, share."""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from personae.kernels.quantized import QuantizedWeight, Stored


@dataclass(frozen=True, slots=True)
class ScaledWeight(QuantizedWeight):
    """scales: [outputs, 1] float32, or as the format says. A scale is finite if its values are."""

    scales: Tensor

    def finite(self) -> bool:
        """See `QuantizedWeight`."""
        return bool(self.scales.isfinite().all())


@dataclass(frozen=True, slots=True)
class EightBitWeight(ScaledWeight):
    """W = values * scales.

    values: [outputs, inputs] of `dtype`, which has eight bits.
    """

    dtype: ClassVar[torch.dtype]

    values: Tensor

    @classmethod
    def empty(cls, outputs: int, inputs: int, device: torch.device) -> Self:
        """A weight to be filled."""
        values = torch.empty(outputs, inputs, dtype=cls.dtype, device=device)
        return cls(inputs, torch.empty(outputs, 1, device=device), values)

    def load(self, stored: Stored) -> None:
        """See `QuantizedWeight`: a checkpoint that has it so is taken as it is."""
        scaled = stored.scaled(self.dtype)
        if scaled is None or scaled[1].shape != self.scales.shape:
            self.copy_(stored.read())
            return
        values, scales = scaled
        self.values.copy_(values)
        self.scales.copy_(scales)

    def read(self) -> Tensor:
        """See `QuantizedWeight`."""
        return self.values.float() * self.scales
