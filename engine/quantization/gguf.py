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
from personae.kernels.decoder import Weight
from personae.kernels.quantized import QuantizedWeight, Stored

MOST_POWER = 252  # E8M0: 12 halves of more than 2^(252 - 127) are no float32


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


class Q5_0Weight(BlockWeight):
    """Five bits: scale * (level - 16)."""

    __slots__ = ()
    kind = "Q5_0"
    type = GGMLQuantizationType.Q5_0
    floats = slice(2)


class Q5_1Weight(BlockWeight):
    """Five bits: scale * level + least."""

    __slots__ = ()
    kind = "Q5_1"
    type = GGMLQuantizationType.Q5_1
    floats = slice(4)


class Q5_KWeight(BlockWeight):
    """Five bits, else as `Q4_KWeight`."""

    __slots__ = ()
    kind = "Q5_K"
    type = GGMLQuantizationType.Q5_K
    floats = slice(4)


class IQ4_NLWeight(BlockWeight):
    """Four bits: scale * one of sixteen uneven numbers."""

    __slots__ = ()
    kind = "IQ4_NL"
    type = GGMLQuantizationType.IQ4_NL
    floats = slice(2)


class IQ4_XSWeight(BlockWeight):
    """Four bits: scale * small scale * one of the same numbers. A small scale has six bits, for 32 inputs;
    eight of them share a scale."""

    __slots__ = ()
    kind = "IQ4_XS"
    type = GGMLQuantizationType.IQ4_XS
    floats = slice(2)


class MXFP4Weight(BlockWeight):
    """Floats of four bits (E2M1), of which 32 share a power of two."""

    __slots__ = ()
    kind = "MXFP4"
    type = GGMLQuantizationType.MXFP4

    def finite(self) -> bool:
        """See `QuantizedWeight`."""
        _, size = GGML_QUANT_SIZES[self.type]
        return not bool((self.rows.view(self.rows.shape[0], -1, size)[:, :, 0] > MOST_POWER).any())


class BlockMethod(QuantizedMethod):
    """A weight that keeps the file's bits."""

    as_stored = True

    def tie(self, embedding: Weight) -> bool:
        """See `LinearMethod`: the embedding's own bits, if it keeps them."""
        if isinstance(embedding, Tensor):
            return False
        self.weight = embedding
        return True


def _method(weight: type[BlockWeight]) -> type[BlockMethod]:
    class Method(BlockMethod):
        kept = weight

    return Method


METHODS: dict[str, type[BlockMethod]] = {
    weight.kind: _method(weight)
    for weight in (
        *(Q8_0Weight, Q4_0Weight, Q4_1Weight, Q5_0Weight, Q5_1Weight),
        *(Q4_KWeight, Q5_KWeight, Q6_KWeight, IQ4_NLWeight, IQ4_XSWeight, MXFP4Weight),
    )
}
