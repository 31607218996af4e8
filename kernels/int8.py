"""Weights as int8 with a scale for each output: half of bfloat16's bytes, and a decode step costs bytes.

A weight becomes the nearest of 255 steps between minus and plus the largest of its output's row. Activations
and sums stay as they are: a product multiplies integers up to 127, which bfloat16 holds exactly, and the sum
is scaled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

STEPS = 127  # of either sign
_CHUNK = 2**18  # elements that are converted at a time


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """W = values * scales. values: [outputs, inputs] int8; scales: [outputs, 1] float32."""

    values: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, outputs: int, inputs: int, device: torch.device) -> "Int8Weight":
        """One to be filled by `copy_`."""
        return cls(
            torch.empty(outputs, inputs, dtype=torch.int8, device=device),
            torch.empty(outputs, 1, device=device),
        )

    @property
    def shape(self) -> torch.Size:
        """[outputs, inputs]."""
        return self.values.shape

    def split(self, outputs: Sequence[int]) -> "Iterator[Int8Weight]":
        """The parts that have so many outputs each, sharing memory with it."""
        sizes = list(outputs)
        for values, scales in zip(
            torch.split(self.values, sizes), torch.split(self.scales, sizes), strict=True
        ):
            yield Int8Weight(values, scales)

    def copy_(self, weight: Tensor) -> None:
        """Fill it with a weight [outputs, inputs] of any floating dtype. A row's scale is finite if the row
        is."""
        rows = max(1, _CHUNK // weight.shape[1])
        for start in range(0, weight.shape[0], rows):
            part = weight[start : start + rows].to(self.values.device, torch.float32)
            scales = part.abs().amax(1, keepdim=True) / STEPS
            steps = (part / scales).round_().nan_to_num_()  # a row of zeros has no scale
            self.values[start : start + rows] = steps.clamp_(-STEPS, STEPS)
            self.scales[start : start + rows] = scales

    def plain(self, dtype: torch.dtype) -> Tensor:
        """W: a copy, rounded to `dtype`."""
        plain = torch.empty(self.values.shape, dtype=dtype, device=self.values.device)
        rows = max(1, _CHUNK // self.values.shape[1])
        for start in range(0, self.values.shape[0], rows):
            plain[start : start + rows] = (
                self.values[start : start + rows] * self.scales[start : start + rows]
            )
        return plain
