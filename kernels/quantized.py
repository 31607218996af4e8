"""Quantized weights. A decode step takes as long as reading its weights' bytes.

`engine/quantization/` defines the formats, one file each. Sums are not quantized. A backend may round what it
multiplies weights by (`reference.round_inputs`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

_CHUNK = 2**16  # elements that are converted at a time


class Stored(Protocol):
    """A tensor of a checkpoint."""

    def read(self) -> Tensor:
        """The tensor in a floating dtype."""

    def copy_to(self, place: Tensor) -> None:
        """Copies the tensor to `place`."""

    def blocks(self, kind: str) -> Tensor:
        """Its blocks in one of GGUF's formats, [rows, bytes] uint8. Only of tensors that have exactly those
        values."""

    def scaled(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Its values in that dtype of 8 bits, [rows, columns], and their scales, [rows, groups] float32, each
        for equally many neighbouring columns; None if the file does not have it so."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight(ABC):
    """W: [outputs, inputs]. All fields but `inputs` are tensors with a row per output.

    kind: the format's name, for backends that multiply it directly.
    """

    kind: ClassVar[str]

    inputs: int

    @classmethod
    @abstractmethod
    def empty(cls, outputs: int, inputs: int, device: torch.device) -> Self:
        """A weight to be filled."""

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of which it consists."""
        return tuple(getattr(self, field.name) for field in fields(self) if field.name != "inputs")

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.tensors()[0].device

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.tensors()[0].shape[0], self.inputs

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        return sum(getattr(self, field.name).nbytes for field in fields(self) if field.name != "inputs")

    def split(self, outputs: int | list[int]) -> Iterator[Self]:
        """Parts with that many outputs each, which share its memory."""
        for parts in zip(*(torch.split(tensor, outputs) for tensor in self.tensors()), strict=True):
            yield type(self)(self.inputs, *parts)

    def load(self, stored: Stored) -> None:
        """Fill it with a tensor of a checkpoint."""
        self.copy_(stored.read())

    def copy_(self, weight: Tensor) -> None:
        """Fill it with a weight [outputs, inputs] of any floating dtype."""
        rows = max(1, _CHUNK // self.inputs)
        for own, part in zip(self.split(rows), torch.split(weight, rows), strict=True):
            own.write(part.to(self.device, torch.float32).contiguous())

    def plain(self, dtype: torch.dtype) -> Tensor:
        """W dequantized: a copy, rounded to `dtype`."""
        plain = torch.empty(self.shape, dtype=dtype, device=self.device)
        rows = max(1, _CHUNK // self.inputs)
        for own, part in zip(self.split(rows), torch.split(plain, rows), strict=True):
            part.copy_(own.read())
        return plain

    @abstractmethod
    def finite(self) -> bool:
        """Whether all values were finite."""

    @abstractmethod
    def write(self, weight: Tensor) -> None:
        """`copy_` from contiguous float32, all at once."""

    @abstractmethod
    def read(self) -> Tensor:
        """`plain` in float32, all at once."""
