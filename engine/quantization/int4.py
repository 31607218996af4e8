"""Four and a half bits per weight: 16 levels, an eight-bit step for every 16 inputs, and a scale per output.

A level times a step is exact in bfloat16, and the whole sum is multiplied by the output's scale. The CPU
kernels round inputs to 8 bits (`reference.round_inputs`). The rounding of a row depends on that row alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from personae.engine.quantization.base import OUTPUT, LinearMethod, QuantizedMethod
from personae.engine.quantization.int8 import Int8
from personae.engine.quantization.scaled import ScaledWeight

GROUP = 16  # inputs that share a step
LEAST, MOST = -8, 7

# The multiples of the step that a group's largest weight may be. Sixteen more reduce the error by only 1 %.
_REACH = (-8.0, -8.0 / 0.96, 8.0 / 1.12, -8.0 / 1.04)


@dataclass(frozen=True, slots=True)
class Int4Weight(ScaledWeight):
    """W = levels * steps * scales. Sixteen inputs share a step, an eight-bit float, so 4.5 bits per weight.

    A step is (1 + fraction / 16) * 2^(exponent - 7) with a sign. The highest bit of its code is the sign,
    followed by three bits of exponent and four of fraction. So a level times a step has eight significant
    bits, as bfloat16. A group uses the step with the least squared error among several candidates. (GGUF's
    Q4_0 has 32 inputs and a 16-bit step.)

    levels: [outputs, groups * 8] int8, -8 to 7, with an even input in the lower half of a byte. steps:
    [outputs, groups] uint8, the codes. The last group is padded with zeros.
    """

    kind: ClassVar[str] = "int4"

    levels: Tensor
    steps: Tensor

    @classmethod
    def empty(cls, outputs: int, inputs: int, device: torch.device) -> "Int4Weight":
        """A weight to be filled."""
        groups = -(-inputs // GROUP)
        levels = torch.empty(outputs, groups * GROUP // 2, dtype=torch.int8, device=device)
        steps = torch.empty(outputs, groups, dtype=torch.uint8, device=device)
        return cls(inputs, torch.empty(outputs, 1, device=device), levels, steps)

    def write(self, weight: Tensor) -> None:
        """See `QuantizedWeight`."""
        scales = weight.abs().amax(1, keepdim=True) / -LEAST
        even = functional.pad(weight / scales, (0, -self.inputs % GROUP)).nan_to_num_(0, 0, 0)
        groups = even.view(-1, GROUP).T.contiguous()  # a group per column, so that vectors span many groups
        top, bottom = groups.amax(0), groups.amin(0)
        largest = torch.where(top > -bottom, top, bottom)
        least, codes = torch.full_like(top, torch.inf), _code(top)
        for reach in _REACH:
            code = _code(largest / reach)
            step = _step(code)
            error = _levels(groups, step).mul_(step).sub_(groups).square_().sum(0)
            codes = torch.where(error < least, code, codes)
            least = torch.minimum(error, least)
        levels = _levels(groups, _step(codes)).to(torch.int8).T.reshape(*self.levels.shape, 2)
        self.levels.copy_(levels[:, :, 0] & 15 | levels[:, :, 1] << 4)
        self.steps.copy_(codes.view_as(self.steps))
        self.scales.copy_(scales)

    def read(self) -> Tensor:
        """See `QuantizedWeight`."""
        levels = torch.stack((self.levels << 4, self.levels), 2).view(*self.steps.shape, GROUP) >> 4
        even = (levels * _step(self.steps.int()).unsqueeze(2)).view(self.shape[0], -1)
        return even[:, : self.inputs] * self.scales


def _levels(groups: Tensor, step: Tensor) -> Tensor:
    """The nearest multiples of the step for each group, which is a column."""
    return (groups / step).round_().clamp_(LEAST, MOST)


def _code(step: Tensor) -> Tensor:
    """The nearest step's code, int32: the upper bits of a float32 with a smaller exponent."""
    code = (step.abs().view(torch.int32) + (1 << 18) >> 19) - (120 << 4)
    return code.clamp_(0, 127) | step.signbit().int() << 7


def _step(code: Tensor) -> Tensor:
    """The inverse of `_code`, float32."""
    size = ((code & 127) + (120 << 4) << 19).view(torch.float32)
    return torch.where(code > 127, -size, size)


class Int4(QuantizedMethod):
    """See `Int4Weight`."""

    kept = Int4Weight


def scheme(names: Sequence[str]) -> type[LinearMethod]:
    """int4 for every module except the output matrix, which is int8: it rounds the logit of each token
    separately."""
    return Int8 if OUTPUT in names else Int4
