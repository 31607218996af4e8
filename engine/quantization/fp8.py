"""Eight bits a weight as floats (E4M3), and activations in eight bits, too (W8A8).

A row of weights has a scale, and a row of activations gets one when it is multiplied: its largest number
becomes 448, the largest of E4M3. The product is torch's scaled one: tensor cores multiply in 8 bits and sum
in float32. Adapters read the activations as they were.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from personae.engine.quantization.base import OUTPUT, LinearMethod, Product, QuantizedMethod
from personae.engine.quantization.scaled import EightBitWeight
from personae.engine.quantization.unquantized import Unquantized
from personae.kernels.reference import FP8, FP8_MAX
from personae.kernels.triton import FP8_CAPABILITY

ALIGNED = 16  # a GPU multiplies only multiples of so many inputs and outputs


@dataclass(frozen=True, slots=True)
class Fp8Weight(EightBitWeight):
    """Each row's largest weight is 448 times its scale. values: float8_e4m3fn."""

    kind: ClassVar[str] = "fp8"
    dtype: ClassVar[torch.dtype] = FP8

    def write(self, weight: Tensor) -> None:
        """See `QuantizedWeight`."""
        values, scales = to_fp8(weight)
        self.values.copy_(values)
        self.scales.copy_(scales)


def to_fp8(x: Tensor, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x: [rows, n] of any floating dtype -> (values of E4M3, scales [rows, 1] float32), x = values * scales.

    `largest`: what becomes the largest of E4M3, [rows, 1] float32; by default the largest of each row. The
    scale of a row that is not finite is not finite either.
    """
    scales = (x.abs().amax(1, keepdim=True).float() if largest is None else largest) / FP8_MAX
    steps = (x.float() / scales).nan_to_num_(0, FP8_MAX, -FP8_MAX)  # a row of zeros has no scale
    return steps.clamp_(-FP8_MAX, FP8_MAX).to(FP8), scales


class Fp8(QuantizedMethod):
    """See `Fp8Weight`. Where the device has no product in 8 bits, the weight is made plain for each product,
    and activations stay as they are."""

    kept = Fp8Weight
    rounds_inputs = True

    weight: Fp8Weight

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(outputs, inputs, dtype, device)
        self._multiplies = device.type != "cuda" or (
            torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
            and inputs % ALIGNED == 0
            and outputs % ALIGNED == 0
        )
        # A GPU writes bfloat16 alone, when rows have scales.
        self._out = torch.bfloat16 if device.type == "cuda" else dtype

    def finish(self, bias: Tensor | None) -> Product:
        """See `LinearMethod`: it lies as torch's product likes it."""
        return self

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `Product`."""
        if not self._multiplies:
            return F.linear(x, self.plain(), bias)
        values, scales = to_fp8(x, self._largest(x))
        rows = ScalingType.RowWise
        y = scaled_mm(
            values, self.weight.values.t(), scales, rows, self.weight.scales.t(), rows, output_dtype=self._out
        ).to(self.dtype)
        return y if bias is None else y.add_(bias)

    def _largest(self, x: Tensor) -> Tensor | None:
        """The largest of each row, of which the ranks may have parts: all round it by one scale, as one
        process does."""
        if self.ranks.size == 1:
            return None
        own = x.abs().amax(1, keepdim=True).float()
        return self.ranks.all_gather(own, [1] * self.ranks.size).amax(1, keepdim=True)


METHODS = {Fp8Weight.kind: Fp8}


def scheme(names: Sequence[str]) -> type[LinearMethod]:
    """Every module but the output matrix, which rounds each token's logit by itself."""
    return Unquantized if OUTPUT in names else Fp8
