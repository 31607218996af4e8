"""Weights in FP8 (E4M3) with scales: one, one for each output, or one for each block of outputs and inputs.

`weight_scale`, or `weight_scale_inv` as DeepSeek, Qwen and others call it: W = values * scales in both.
Blocks at the edges may be partial. Scales of activations (`input_scale`) are not used: activations get a
scale for each token where a product rounds them, and stay as they are elsewhere. Experts may lie in one
tensor NAME, with scales of blocks in NAME_scale_inv.
"""

import re
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from personae.engine.checkpoints.base import StoredTensor
from personae.engine.checkpoints.quantized.base import (
    FLOATS,
    Compose,
    PackedTensor,
    expect,
    matrix,
    mistaken,
    modules,
    take,
)
from personae.engine.fields import Fields
from personae.engine.quantization import FP8_BLOCK
from personae.errors import as_json
from personae.kernels.reference import FP8

IN_8_BITS, POWERS = "F8_E4M3", ("F8_E8M0", "U8")
MEANINGLESS = frozenset(
    [
        *("activation_scheme", "modules_to_not_convert", "ignored_layers", "scale_fmt", "dequantize"),
        *("kv_cache_scheme", "modules_to_convert", "is_scale_transposed"),
    ]
)
_SUFFIX = "_scale_inv"  # of all experts' scales
_KV_SCALES = re.compile(r"\.(?:[kqv]|prob)_scale$|\.[kqv]_proj\.(?:output|[kqv])_scale$")


class Fp8Tensor(PackedTensor):
    """parts: "weight" and its scales. `group` is the inputs of a block."""

    __slots__ = ()
    method = "fp8"

    @property
    def stored_scales(self) -> StoredTensor:
        """As in the file."""
        return next(part for end, part in self.parts.items() if end != "weight")

    def scales(self) -> Tensor:
        """See `PackedTensor`."""
        outputs, inputs = self.shape
        scales = read_scales(self.stored_scales).reshape(-1, -(-inputs // self.group))
        return scales.expand(outputs, -1)

    def levels(self) -> Tensor:
        """See `PackedTensor`: E4M3."""
        return self.parts["weight"].read()

    @property
    def kept(self) -> str | None:
        """See `StoredTensor`."""
        return "fp8" if self.group == self.shape[1] else None

    def scaled(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """See `StoredTensor`."""
        return (self.levels(), self._finite()) if dtype is FP8 and self.kept else None


class BlockFp8Tensor(Fp8Tensor):
    """Scales of blocks that are square."""

    __slots__ = ()

    def scales(self) -> Tensor:
        """See `PackedTensor`."""
        scales = read_scales(self.stored_scales)
        scales = scales.reshape(-(-self.shape[0] // self.group), -(-self.shape[1] // self.group))
        return scales.repeat_interleave(self.group, 0)[: self.shape[0]]

    @property
    def kept(self) -> str | None:
        """See `StoredTensor`."""
        return "fp8_blocks" if self.group == FP8_BLOCK and self.shape[1] % FP8_BLOCK == 0 else None


@dataclass(frozen=True, slots=True)
class ExpertsFp8Tensor(StoredTensor):
    """The matrices of all experts, with scales of square blocks in each."""

    values: StoredTensor
    scales: StoredTensor
    block: int

    def read(self) -> Tensor:
        """See `StoredTensor`: float32."""
        return torch.stack([self.entry(expert) for expert in range(self.shape[0])])

    def entry(self, index: int) -> Tensor:
        """See `StoredTensor`."""
        scales = self.scales.entry(index)
        scales = powers(scales) if self.scales.dtype in POWERS else scales.float()
        if not scales.isfinite().all():
            raise mistaken(self.scales, "has scales that are not finite")
        rows, columns = self.shape[1:]
        whole = scales.repeat_interleave(self.block, 0)[:rows].repeat_interleave(self.block, 1)[:, :columns]
        return self.values.entry(index).float().mul_(whole)


def read_scales(stored: StoredTensor) -> Tensor:
    """Scales in float32, of floats or of powers of two."""
    return powers(stored.read()) if stored.dtype in POWERS else stored.read().float()


def powers(stored: Tensor) -> Tensor:
    """Scales that are powers of two: uint8 or E8M0, the exponent plus 127 -> float32. 255 is not a number."""
    exponents = stored.view(torch.uint8)
    return torch.exp2(exponents.float() - 127).masked_fill_(exponents == 255, torch.nan)


def with_scales(stored: dict[str, StoredTensor], block: int | None = None) -> dict[str, StoredTensor]:
    """See `Compose`: weights of E4M3 with their scales. block: the size of blocks, if scales are of blocks.

    A weight without scales stays as it is, and is refused later.
    """
    if block is not None:
        for name, values in list(stored.items()):
            if values.dtype == IN_8_BITS and len(values.shape) == 3 and name + _SUFFIX in stored:
                stored[name] = _experts(values, stored.pop(name + _SUFFIX), block)
    for module in list(modules(stored, "weight")):
        if stored[f"{module}weight"].dtype != IN_8_BITS:
            continue
        parts = take(stored, module, "weight", "weight_scale_inv", "weight_scale")
        take(stored, module, "input_scale", "activation_scale")
        if len(parts) < 2:
            stored |= {f"{module}{end}": part for end, part in parts.items()}
            continue
        stored[f"{module}weight"] = compose_fp8(parts, block)
    return without_kv_scales(stored)


def compose_fp8(parts: dict[str, StoredTensor], block: int | None) -> StoredTensor:
    """A weight of E4M3, and its scales."""
    scales = next(part for end, part in parts.items() if end != "weight")
    outputs, inputs = matrix(parts["weight"])
    if scales.shape in ((), (1,), (1, 1), (outputs,), (outputs, 1)) and block is None:
        expect(scales, FLOATS, scales.shape)
        return Fp8Tensor.of(parts, (outputs, inputs), inputs)
    if scales.shape == (outputs, -(-inputs // 32)) and scales.dtype == "U8":
        return Fp8Tensor.of(parts, (outputs, inputs), 32)
    if block is None:
        raise mistaken(
            scales,
            f"{list(scales.shape)} {scales.dtype} are no scales of {outputs} outputs and {inputs} inputs",
        )
    down, across = -(-outputs // block), -(-inputs // block)
    expect(scales, (*FLOATS, *POWERS), (down, across), (down, 1, across, 1))
    return BlockFp8Tensor.of(parts, (outputs, inputs), block)


def _experts(values: StoredTensor, scales: StoredTensor, block: int) -> StoredTensor:
    """The weights of all experts in one tensor, and their scales."""
    experts, rows, columns = values.shape
    expect(scales, (*FLOATS, *POWERS), (experts, -(-rows // block), -(-columns // block)))
    size = values.bytes + scales.bytes
    return ExpertsFp8Tensor(values.name, values.file, values.shape, "fp8", True, size, values, scales, block)


def without_kv_scales(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Without the scales for a KV cache in eight bits: this one keeps more of them, and needs no scales."""
    return {name: tensor for name, tensor in stored.items() if not _KV_SCALES.search(name)}


def read_block(fields: Fields, name: str) -> int | None:
    """The size of square blocks; None if the file has none."""
    found = fields.raw(name)
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != 2 or not all(type(n) is int and n > 0 for n in found):
        raise fields.error(name, f"expected two sizes, found {as_json(found)}")
    if found[0] != found[1]:
        raise fields.error(name, f"{as_json(found)} is not supported: blocks are square")
    size: int = found[0]
    return size


def translate(fields: Fields) -> Compose:
    """See `personae.engine.checkpoints.quantized`."""
    if fields.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise fields.error("fmt", f"{as_json(fields.raw('fmt'))} is not supported, only e4m3")
    return partial(with_scales, block=read_block(fields, "weight_block_size"))
