"""GGUF's formats that keep the file's bits.

The CPU kernels multiply the file's values by inputs that are rounded to 8 bits (`reference.round_inputs`).
Without them, dequantized values are rounded to the model's dtype. Other formats are dequantized when they are
read (`engine/checkpoints/gguf/`).
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from personae.engine.quantization.base import QuantizedMethod
from personae.kernels.quantized import QuantizedWeight, Stored


@dataclass(frozen=True, slots=True)
class BlockWeight(QuantizedWeight):
    """rows: [outputs, bytes] uint8, the blocks of each output's row as in the file.

    floats: where a block has its float16 numbers.
    """

    type: ClassVar[GGMLQuantizationType]
    floats: ClassVar[slice]

    rows: Tensor

    @classmethod
    def empty(cls, outputs: int, inputs: int, device: torch.device) -> Self:
        """A weight to be filled. inputs: a multiple of the block's size."""
        elements, size = GGML_QUANT_SIZES[cls.type]
        return cls(inputs, torch.empty(outputs, inputs // elements * size, dtype=torch.uint8, device=device))

    def load(self, stored: Stored) -> None:
        """See `QuantizedWeight`."""
        self.rows.copy_(stored.blocks(self.kind))

    def finite(self) -> bool:
        """See `QuantizedWeight`."""
        _, size = GGML_QUANT_SIZES[self.type]
        scales = self.rows.view(self.rows.shape[0], -1, size)[:, :, self.floats]
        return bool(scales.contiguous().view(torch.float16).isfinite().all())

    def write(self, weight: Tensor) -> None:
        """Not supported: it is filled with a file's blocks."""
        raise NotImplementedError

    def read(self) -> Tensor:
        """See `QuantizedWeight`."""
        plain: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = dequantize(
            self.rows.cpu().numpy(), self.type
        )
        return torch.from_numpy(plain).to(self.device)


class Q8_0Weight(BlockWeight):
    """Eight bits: scale * level."""

    __slots__ = ()
    kind = "Q8_0"
    type = GGMLQuantizationType.Q8_0
    floats = slice(2)


class Q4_0Weight(BlockWeight):
    """Four bits: scale * (level - 8)."""

    __slots__ = ()
    kind = "Q4_0"
    type = GGMLQuantizationType.Q4_0
    floats = slice(2)


class Q4_1Weight(BlockWeight):
    """Four bits: scale * level + least."""

    __slots__ = ()
    kind = "Q4_1"
    type = GGMLQuantizationType.Q4_1
    floats = slice(4)


class Q4_KWeight(BlockWeight):
    """Four bits: scale * small scale * level - least * small least. The small ones have six bits; eight
    blocks of 32 inputs share scale and least."""

    __slots__ = ()
    kind = "Q4_K"
    type = GGMLQuantizationType.Q4_K
    floats = slice(4)


class Q6_KWeight(BlockWeight):
    """Six bits: scale * small scale * (level - 32). A small scale has eight bits, for 16 inputs; sixteen of
    them share a scale."""

    __slots__ = ()
    kind = "Q6_K"
    type = GGMLQuantizationType.Q6_K
    floats = slice(208, 210)


class BlockMethod(QuantizedMethod):
    """A weight that keeps the file's bits."""

    own_copy = True


class Q8_0(BlockMethod):
    """See `Q8_0Weight`."""

    kept = Q8_0Weight


class Q4_0(BlockMethod):
    """See `Q4_0Weight`."""

    kept = Q4_0Weight


class Q4_1(BlockMethod):
    """See `Q4_1Weight`."""

    kept = Q4_1Weight


class Q4_K(BlockMethod):
    """See `Q4_KWeight`."""

    kept = Q4_KWeight


class Q6_K(BlockMethod):
    """See `Q6_KWeight`."""

    kept = Q6_KWeight


METHODS: dict[str, type[BlockMethod]] = {
    method.kept.kind: method for method in (Q8_0, Q4_0, Q4_1, Q4_K, Q6_K)
}
