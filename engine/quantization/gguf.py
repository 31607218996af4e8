"""GGUF's formats that keep the file's bits: 32 inputs of an output share a float16 scale.

Dequantized values are rounded to the model's dtype before the product. So a product has the same bits as with
the dequantized weight. Other formats are dequantized when they are read (`engine/checkpoints/gguf/`).
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
    """rows: [outputs, bytes] uint8, the blocks of each output's row as in the file."""

    type: ClassVar[GGMLQuantizationType]

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
        scales = self.rows.view(self.rows.shape[0], -1, size)[:, :, : 4 if self.kind == "Q4_1" else 2]
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


class Q4_0Weight(BlockWeight):
    """Four bits: scale * (level - 8)."""

    __slots__ = ()
    kind = "Q4_0"
    type = GGMLQuantizationType.Q4_0


class Q4_1Weight(BlockWeight):
    """Four bits: scale * level + least."""

    __slots__ = ()
    kind = "Q4_1"
    type = GGMLQuantizationType.Q4_1


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


METHODS: dict[str, type[BlockMethod]] = {method.kept.kind: method for method in (Q8_0, Q4_0, Q4_1)}
