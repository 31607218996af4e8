"""What the formats of quantized checkpoints share: a matrix that is made of several tensors of a file."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from personae.engine.checkpoints.base import StoredTensor
from personae.errors import ModelLoadError
from personae.kernels.reference import FP8

Compose = Callable[[dict[str, StoredTensor]], dict[str, StoredTensor]]
"""From the tensors of the files to those of the decoder, by name."""

BLOCK = 32  # inputs of a block in the formats Q4_0 and Q8_0


@dataclass(frozen=True, slots=True)
class PackedTensor(StoredTensor):
    """W = levels * scales, the weight of one linear module: [outputs, inputs].

    parts: the file's tensors by the ends of their names. group: how many neighbouring inputs share a scale.
    """

    parts: Mapping[str, StoredTensor]
    group: int

    method: ClassVar[str]
    """The format's name."""

    @classmethod
    def of(cls, parts: Mapping[str, StoredTensor], shape: tuple[int, int], group: int) -> Self:
        """Composed of `parts`, the first of which has the values."""
        first, size = next(iter(parts.values())), sum(part.bytes for part in parts.values())
        return cls(first.name, first.file, shape, cls.method, True, size, parts, group)

    @abstractmethod
    def scales(self) -> Tensor:
        """[outputs, groups] float32."""

    @abstractmethod
    def levels(self) -> Tensor:
        """[outputs, inputs]: whole numbers in an integer dtype, or floats."""

    def limits(self) -> tuple[int, int] | None:
        """The least and the largest level that there can be; None if levels are no whole numbers."""
        return None

    def groups(self) -> Tensor | None:
        """The group of each input, [inputs]; None if neighbours form the groups."""
        return None

    def read(self) -> Tensor:
        """See `StoredTensor`: float32, the product of each level and its scale."""
        scales, groups, (outputs, inputs) = self._finite(), self.groups(), self.shape
        plain = self.levels().float()
        if groups is not None:
            return plain.mul_(scales[:, groups])
        if inputs % self.group:
            return plain.mul_(scales.repeat_interleave(self.group, 1)[:, :inputs])
        plain.view(outputs, -1, self.group).mul_(scales.unsqueeze(2))
        return plain

    @property
    def kept(self) -> str | None:
        """See `StoredTensor`. Reads the scales and the zero points, but not the values."""
        limits, inputs = self.limits(), self.shape[1]
        if limits is None or self.groups() is not None:
            return None
        scales, (low, high) = self._finite(), limits
        in_halves = scales.half().float().equal(scales) and self.group % BLOCK == 0 and inputs % BLOCK == 0
        if in_halves and low >= -8 and high <= 7:
            return "Q4_0"
        if low < -128 or high > 127:
            return None
        if scales.shape[1] == 1:
            return "int8"
        return "Q8_0" if in_halves else None

    def blocks(self, kind: str) -> Tensor:
        """See `StoredTensor`: for each 32 inputs, a scale in float16 and the levels."""
        outputs, inputs = self.shape
        levels = self.levels().to(torch.int8).view(outputs, -1, BLOCK)
        scales = self._finite().half().repeat_interleave(max(1, self.group // BLOCK), 1)
        scales = scales[:, : inputs // BLOCK].unsqueeze(2).contiguous().view(torch.uint8)
        if kind == "Q4_0":
            nibbles = (levels + 8).to(torch.uint8)
            stored = nibbles[:, :, : BLOCK // 2] | nibbles[:, :, BLOCK // 2 :] << 4
        else:
            stored = levels.view(torch.uint8)
        return torch.cat((scales, stored), 2).view(outputs, -1)

    def scaled(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """See `StoredTensor`."""
        scales = self._finite()
        if scales.shape[1] != 1 or dtype is FP8 or self.limits() is None:
            return None
        return self.levels().to(dtype), scales

    def _finite(self) -> Tensor:
        """The scales, which must be numbers."""
        scales = self.scales()
        if not scales.isfinite().all():
            raise ModelLoadError(f"{Path(self.file).name}: {self.name} has scales that are not finite")
        return scales


def modules(stored: Mapping[str, StoredTensor], suffix: str) -> Iterator[str]:
    """The names of the modules that have a tensor of that suffix, with a dot at the end."""
    for name in stored:
        if name.endswith(f".{suffix}"):
            yield name.removesuffix(suffix)


def take(stored: dict[str, StoredTensor], module: str, *suffixes: str) -> dict[str, StoredTensor]:
    """Removes a module's tensors with these suffixes. Returns the ones that it has."""
    return {end: stored.pop(module + end) for end in suffixes if module + end in stored}


def need(parts: Mapping[str, StoredTensor], module: str, *suffixes: str) -> None:
    """Raises ModelLoadError unless the module has all these tensors."""
    for suffix in suffixes:
        if suffix not in parts:
            file = Path(next(iter(parts.values())).file).name
            raise ModelLoadError(f"{file}: {module}{suffix} is missing")


def expect(part: StoredTensor, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
    """Raises ModelLoadError unless a tensor has one of these dtypes and shapes."""
    if part.dtype not in dtypes or part.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise mistaken(
            part, f"expected {wanted} {' or '.join(dtypes)}, found {list(part.shape)} {part.dtype}"
        )


def mistaken(part: StoredTensor, why: str) -> ModelLoadError:
    """An error about a tensor, for the caller to raise."""
    return ModelLoadError(f"{Path(part.file).name}: {part.name}: {why}")


def matrix(part: StoredTensor) -> tuple[int, int]:
    """The shape of a tensor, which must have two dimensions and elements."""
    if len(part.shape) != 2 or prod(part.shape) == 0:
        raise mistaken(part, f"expected a matrix, found {list(part.shape)}")
    return part.shape[0], part.shape[1]


FLOATS = ("F16", "BF16", "F32")


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """[rows, words] int32 -> [rows, count] uint8: each row is a stream of bits, and a field's `bits` begin
    with the least significant."""
    if 8 % bits == 0:
        fields = words.reshape(-1).view(torch.uint8).view(words.shape[0], -1)
        parts = [fields >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
        return torch.stack(parts, 2).view(words.shape[0], -1)[:, :count]
    first = torch.arange(count) * bits
    at, shift = first // 32, first % 32
    following = (at + 1).clamp_max(words.shape[1] - 1)
    found = torch.empty(words.shape[0], count, dtype=torch.uint8)
    for start in range(0, words.shape[0], 256):
        wide = words[start : start + 256].long() & 0xFFFFFFFF
        pair = wide[:, at] | wide[:, following] << 32
        found[start : start + 256] = pair >> shift & (1 << bits) - 1
    return found


def group_size(fields_size: int, inputs: int) -> int:
    """The inputs of a group; a size of -1 means all."""
    return inputs if fields_size == -1 else fields_size
