"""The experts of gpt-oss in MXFP4: `NAME_blocks` uint8 [experts, outputs, inputs / 32, 16] and `NAME_scales`
uint8 [experts, outputs, inputs / 32] are the tensor NAME [experts, inputs, outputs]."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from personae.engine.checkpoints.base import StoredTensor
from personae.engine.checkpoints.quantized.base import Compose, expect, mistaken
from personae.engine.checkpoints.quantized.fp4 import blocks_of, levels_of
from personae.engine.checkpoints.quantized.fp8 import powers
from personae.engine.fields import Fields
from personae.errors import ModelLoadError

MEANINGLESS = frozenset(["modules_to_not_convert", "dequantize"])
BLOCKS, SCALES = "_blocks", "_scales"


@dataclass(frozen=True, slots=True)
class ExpertsTensor(StoredTensor):
    """W = levels * scales of all experts, transposed."""

    packed: StoredTensor
    scales: StoredTensor

    def read(self) -> Tensor:
        """See `StoredTensor`: float32."""
        return torch.stack([self.entry(expert) for expert in range(self.shape[0])])

    def entry(self, index: int) -> Tensor:
        """See `StoredTensor`."""
        scales = self._finite(self.scales.entry(index)) / 2
        return (levels_of(self.packed.entry(index)) * scales.unsqueeze(-1)).flatten(1).T

    @property
    def kept(self) -> str | None:
        """See `StoredTensor`."""
        return "MXFP4"

    def entry_blocks(self, index: int, kind: str) -> Tensor:
        """See `StoredTensor`."""
        scales = self.scales.entry(index)
        self._finite(scales)
        return blocks_of(self.packed.entry(index).flatten(1), scales)

    def _finite(self, scales: Tensor) -> Tensor:
        found = powers(scales)
        if not found.isfinite().all():
            raise ModelLoadError(f"{Path(self.file).name}: {self.name} has scales that are not finite")
        return found


def compose(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """See `Compose`."""
    for name in [name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)]:
        packed, scales = stored.pop(name + BLOCKS), stored.pop(name + SCALES, None)
        if scales is None or len(packed.shape) != 4:
            raise mistaken(packed, f"expected four dimensions, and {name}{SCALES} beside it")
        experts, outputs, groups, _ = packed.shape
        expect(packed, ("U8",), (experts, outputs, groups, 16))
        expect(scales, ("U8",), (experts, outputs, groups))
        shape, size = (experts, groups * 32, outputs), packed.bytes + scales.bytes
        stored[name] = ExpertsTensor(packed.name, packed.file, shape, "mxfp4", True, size, packed, scales)
    return stored


def translate(fields: Fields) -> Compose:
    """See `personae.engine.checkpoints.quantized`."""
    return compose
