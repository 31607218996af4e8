"""Weights of four bits that are floats (E2M1), two in a byte, the even input in the lower half.

MXFP4: a power of two scales 32 inputs. NVFP4: E4M3 scales 16 inputs, and one float32 all of them; it divides
in compressed-tensors' files, and multiplies in ModelOpt's.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from personae.engine.checkpoints.base import StoredTensor
from personae.engine.checkpoints.quantized.base import PackedTensor, expect, matrix, mistaken
from personae.engine.checkpoints.quantized.fp8 import POWERS, powers

TWICE = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], dtype=torch.int8)
TWICE = torch.cat((TWICE, -TWICE))
"""Twice the value of each code, a whole number."""


class Fp4Tensor(PackedTensor):
    """Levels are twice the values, and scales are half of the file's."""

    __slots__ = ()

    def limits(self) -> tuple[int, int] | None:
        """See `PackedTensor`."""
        return int(TWICE.min()), int(TWICE.max())

    def levels(self) -> Tensor:
        """See `PackedTensor`: int8."""
        return levels_of(self._packed())

    def _packed(self) -> Tensor:
        return next(iter(self.parts.values())).read()


class Mxfp4Tensor(Fp4Tensor):
    """Scales are powers of two."""

    __slots__ = ()
    method = "mxfp4"

    def scales(self) -> Tensor:
        """See `PackedTensor`."""
        return powers(self.parts["weight_scale"].read()) / 2

    @property
    def kept(self) -> str | None:
        """See `StoredTensor`."""
        return "MXFP4" if self.shape[1] % self.group == 0 else None

    def blocks(self, kind: str) -> Tensor:
        """See `StoredTensor`."""
        self._finite()
        return blocks_of(self._packed(), self.parts["weight_scale"].read())


class Nvfp4Tensor(Fp4Tensor):
    """The global scale divides."""

    __slots__ = ()
    method = "nvfp4"

    def scales(self) -> Tensor:
        """See `PackedTensor`."""
        return (
            self.parts["weight_scale"].read().float() / self.parts["weight_global_scale"].read().float() / 2
        )


class ModelOptNvfp4Tensor(Nvfp4Tensor):
    """The global scale multiplies."""

    __slots__ = ()

    def scales(self) -> Tensor:
        """See `PackedTensor`."""
        return self.parts["weight_scale"].read().float() * self.parts["weight_scale_2"].read().float() / 2


def levels_of(packed: Tensor) -> Tensor:
    """[..., bytes] uint8 -> [..., 2 * bytes] int8, twice the values."""
    return TWICE[torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()]


def blocks_of(packed: Tensor, powers: Tensor) -> Tensor:
    """Blocks as GGUF's MXFP4 has them, [rows, bytes] uint8: the power, then of each half of 32 inputs one in
    a byte. packed: [rows, inputs / 2], powers: [rows, inputs / 32], both of one byte each."""
    codes = torch.stack((packed & 15, packed >> 4), -1).view(len(packed), -1, 2, 16)
    halves = codes[:, :, 0] | codes[:, :, 1] << 4
    return torch.cat((powers.view(torch.uint8).unsqueeze(2), halves), 2).flatten(1)


def compose_fp4(parts: Mapping[str, StoredTensor], *, divides: bool) -> StoredTensor:
    """A weight of packed bytes, the first part, and its scales."""
    packed, scales = next(iter(parts.values())), parts["weight_scale"]
    outputs, count = matrix(packed)
    inputs = count * 2
    expect(packed, ("U8",), (outputs, count))
    if scales.dtype in POWERS:
        expect(scales, POWERS, (outputs, -(-inputs // 32)))
        return Mxfp4Tensor.of(parts, (outputs, inputs), 32)
    expect(scales, ("F8_E4M3",), (outputs, -(-inputs // 16)))
    total = parts.get("weight_global_scale" if divides else "weight_scale_2")
    if total is None:
        raise mistaken(packed, "has no scale of the whole tensor beside it")
    expect(total, ("F32",), (), (1,))
    kind = Nvfp4Tensor if divides else ModelOptNvfp4Tensor
    return kind.of(parts, (outputs, inputs), 16)
