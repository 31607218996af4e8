"""Weights in few bits: a decode step costs the bytes that it reads.

What they are and how they are made is said by `engine/quantization/`, a file for each format. Activations and
sums stay as they are.
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
        """It, in a floating dtype."""

    def copy_to(self, place: Tensor) -> None:
        """Fills a tensor with it."""

    def blocks(self) -> Tensor:
        """Its blocks as the file has them, [rows, bytes] uint8: only of tensors that are quantized."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight(ABC):
    """W: [outputs, inputs]. All fields but `inputs` are tensors with a row for each output.

    kind: how it lies, for backends that multiply it so.
    """

    kind: ClassVar[str]

    inputs: int

    @classmethod
    @abstractmethod
    def empty(cls, outputs: int, inputs: int, device: torch.device) -> Self:
        """One to be filled."""

    def tensors(self) -> tuple[Tensor, ...]:
        """What it consists of."""
        return tuple(getattr(self, field.name) for field in fields(self) if field.name != "inputs")

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.tensors()[0].device

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.tensors()[0].shape[0], self.inputs

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return sum(getattr(self, field.name).nbytes for field in fields(self) if field.name != "inputs")

    def split(self, outputs: int | list[int]) -> Iterator[Self]:
        """The parts that have so many outputs each, sharing memory with it."""
        for parts in zip(*(torch.split(tensor, outputs) for tensor in self.tensors()), strict=True):
            yield type(self)(self.inputs, *parts)

    def load(self, stored: Stored) -> None:
        """Fill it with a tensor of a checkpoint."""
        self.copy_(stored.read())

    def copy_(self, weight: Tensor) -> None:
        """Fill it with a weight [outputs, inputs] of any floating dtype."""
        rows = max(1, _CHUNK // self.inputs)
        for own, part in zip(self.split(rows), torch.split(weight, rows), strict=True):
            own.write(part.to(self.device, torch.float32))

    def plain(self, dtype: torch.dtype) -> Tensor:
        """W: a copy, rounded to `dtype`."""
        plain = torch.empty(self.shape, dtype=dtype, device=self.device)
        rows = max(1, _CHUNK // self.inputs)
        for own, part in zip(self.split(rows), torch.split(plain, rows), strict=True):
            part.copy_(own.read())
        return plain

    @abstractmethod
    def finite(self) -> bool:
        """Whether what it was filled with was finite."""

    @abstractmethod
    def write(self, weight: Tensor) -> None:
        """`copy_` of float32, at once."""

    @abstractmethod
    def read(self) -> Tensor:
        """`plain` in float32, at once."""
