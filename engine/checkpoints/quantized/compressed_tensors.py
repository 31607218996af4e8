"""compressed-tensors, as llm-compressor writes it. The tensors themselves say what each module's layout is.

- `weight_packed` int32: whole numbers of 2 to 8 bits, packed along inputs, the middle added; zero points
  packed along outputs. `weight_g_idx`, in older files, has the group of each input.
- `weight` int8: whole numbers, one scale for each output or group.
- `weight` E4M3: see `fp8.py`; scales of uint8 are powers of two for 32 inputs (MXFP8).
- `weight_packed` uint8: see `fp4.py` (MXFP4 and NVFP4).
"""

from functools import partial
from pathlib import Path
from typing import Any

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
    need,
    take,
    unpack,
)
from personae.engine.checkpoints.quantized.fp4 import compose_fp4
from personae.engine.checkpoints.quantized.fp8 import IN_8_BITS, compose_fp8, read_block, without_kv_scales
from personae.engine.fields import Fields
from personae.errors import ModelLoadError, as_json

FORMATS = (
    *("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mxfp4-pack-quantized"),
    *("mxfp8-quantized", "nvfp4-pack-quantized", "mixed-precision"),
)
MEANINGLESS = frozenset(
    [
        *("ignore", "kv_cache_scheme", "quantization_status", "global_compression_ratio", "version"),
        *("moe_sparsity_config", "run_compressed", "targets"),
        *("input_activations", "output_activations"),  # they stay as they are, or are rounded as in `fp8.py`
        # Of the weights of a group: the tensors say it, or it is how the values were found.
        *("dynamic", "observer", "observer_kwargs", "scale_dtype", "zp_dtype", "actorder", "symmetric"),
    ]
)
STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")


class IntegerTensor(PackedTensor):
    """Whole numbers in int8."""

    __slots__ = ()
    method = "int-quantized"

    def scales(self) -> Tensor:
        """See `PackedTensor`."""
        scales, outputs = self.parts["weight_scale"].read().float(), self.shape[0]
        return scales.reshape(1 if scales.numel() == 1 else outputs, -1).expand(outputs, -1)

    def zeros(self) -> Tensor | None:
        """[outputs, groups] int16; None where all are 0."""
        part = self.parts.get("weight_zero_point")
        if part is None:
            return None
        zeros = part.read().short()
        return zeros.reshape(1 if zeros.numel() == 1 else self.shape[0], -1).expand(self.shape[0], -1)

    def limits(self) -> tuple[int, int]:
        """See `PackedTensor`."""
        zeros = self.zeros()
        return (-128, 127) if zeros is None else (-128 - int(zeros.max()), 127 - int(zeros.min()))

    def levels(self) -> Tensor:
        """See `PackedTensor`: int8, or int16 with zero points."""
        values, zeros = self.parts["weight"].read(), self.zeros()
        return values if zeros is None else values.short() - zeros.repeat_interleave(self.group, 1)


class PackedIntegerTensor(PackedTensor):
    """Whole numbers of a few bits in words of 32."""

    __slots__ = ()
    method = "pack-quantized"

    @property
    def bits(self) -> int:
        """Of a value."""
        return self.parts["weight_packed"].shape[1] * 32 // self.shape[1]

    def scales(self) -> Tensor:
        """See `PackedTensor`."""
        scales, outputs = self.parts["weight_scale"].read().float(), self.shape[0]
        return scales.reshape(1 if scales.numel() == 1 else outputs, -1).expand(outputs, -1)

    def zeros(self) -> Tensor:
        """[outputs, groups] int16, with the middle added."""
        part = self.parts.get("weight_zero_point")
        if part is None:
            return torch.full((self.shape[0], 1), 1 << self.bits - 1, dtype=torch.int16)
        return unpack(part.read().T, self.bits, self.shape[0]).short().T

    def limits(self) -> tuple[int, int]:
        """See `PackedTensor`."""
        zeros = self.zeros()
        return -int(zeros.max()), (1 << self.bits) - 1 - int(zeros.min())

    def groups(self) -> Tensor | None:
        """See `PackedTensor`: those of `weight_g_idx`, unless it has none or neighbours form the groups."""
        part = self.parts.get("weight_g_idx")
        if part is None:
            return None
        groups, count = part.read().long(), self.parts["weight_scale"].shape[1]
        if groups.eq(-1).all() or groups.equal(torch.arange(self.shape[1]) // self.group):
            return None
        if groups.min() < 0 or groups.max() >= count:
            raise mistaken(part, f"names groups that are not among the {count} of the scales")
        return groups

    def levels(self) -> Tensor:
        """See `PackedTensor`: int16."""
        values, zeros = (
            unpack(self.parts["weight_packed"].read(), self.bits, self.shape[1]).short(),
            self.zeros(),
        )
        if zeros.shape[1] > 1:
            groups = self.groups()
            zeros = zeros[:, torch.arange(self.shape[1]) // self.group if groups is None else groups]
        return values.sub_(zeros)


def compose(
    stored: dict[str, StoredTensor], bits: frozenset[int], sizes: frozenset[int], blocks: frozenset[int]
) -> dict[str, StoredTensor]:
    """See `Compose`. bits, sizes, blocks: what the config's groups have, nothing where it says nothing."""
    for module in [*modules(stored, "weight_packed")]:
        ends = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_global_scale")
        parts = take(stored, module, *ends)
        shape = stored.pop(f"{module}weight_shape", None)
        need(parts, module, "weight_scale")
        if parts["weight_packed"].dtype == "U8":
            stored[f"{module}weight"] = compose_fp4(parts, divides=True)
        else:
            stored[f"{module}weight"] = _packed(parts, module, shape, bits, sizes)
    for module in [*modules(stored, "weight")]:
        weight = stored[f"{module}weight"]
        if isinstance(weight, PackedTensor) or weight.dtype not in ("I8", IN_8_BITS):
            continue
        parts = take(stored, module, "weight", "weight_scale", "weight_zero_point")
        take(stored, module, "input_scale", "input_zero_point")
        if "weight_scale" not in parts:
            stored[f"{module}weight"] = weight  # is refused later
        elif weight.dtype == "I8":
            stored[f"{module}weight"] = _integers(parts, sizes)
        else:
            stored[f"{module}weight"] = _floats(parts, blocks)
    return without_kv_scales(stored)


def _floats(parts: dict[str, StoredTensor], blocks: frozenset[int]) -> StoredTensor:
    """E4M3, with scales of blocks if they are no others."""
    scales, rows = parts["weight_scale"], parts["weight"].shape[0]
    whole = scales.shape in ((), (1,), (1, 1), (rows,), (rows, 1)) or scales.dtype == "U8"
    fits = [block for block in blocks if not whole and scales.shape[:1] == (-(-rows // block),)]
    return compose_fp8(parts, fits[0] if fits else None)


def _group(scales: StoredTensor, outputs: int, inputs: int, sizes: frozenset[int]) -> int:
    """The inputs of a group, by the shape of the scales, which must be what the config says."""
    if scales.shape in ((), (1,), (1, 1), (outputs,), (outputs, 1)):
        return inputs
    fits = [size for size in sizes if scales.shape == (outputs, -(-inputs // size))]
    if not fits:
        named = ", ".join(map(str, sorted(sizes))) or "no size"
        raise mistaken(
            scales,
            f"{list(scales.shape)} are no scales of {outputs} outputs and {inputs} inputs in "
            f"groups of {named}",
        )
    return fits[0]


def _packed(
    parts: dict[str, StoredTensor],
    module: str,
    stored_shape: StoredTensor | None,
    bits: frozenset[int],
    sizes: frozenset[int],
) -> StoredTensor:
    packed, scales = parts["weight_packed"], parts["weight_scale"]
    outputs, words = matrix(packed)
    if stored_shape is None:
        raise ModelLoadError(f"{Path(packed.file).name}: {module}weight_shape is missing")
    expect(stored_shape, ("I64", "I32"), (2,))
    rows, inputs = map(int, stored_shape.read().tolist())
    fits = [n for n in bits if words == -(-inputs * n // 32) and words * 32 // max(1, inputs) == n]
    if rows != outputs or inputs < 1 or not fits:
        raise mistaken(
            packed,
            f"[{outputs}, {words}] is no weight of {rows} outputs and {inputs} inputs in "
            f"{', '.join(map(str, sorted(bits)))} bits",
        )
    expect(packed, ("I32",), (outputs, words))
    group = _group(scales, outputs, inputs, sizes)
    expect(scales, FLOATS, scales.shape)
    count = 1 if group == inputs else scales.shape[1]
    if "weight_zero_point" in parts:
        expect(parts["weight_zero_point"], ("I32",), (-(-outputs * fits[0] // 32), count))
    if "weight_g_idx" in parts:
        expect(parts["weight_g_idx"], ("I32", "I64"), (inputs,))
    return PackedIntegerTensor.of(parts, (outputs, inputs), group)


def _integers(parts: dict[str, StoredTensor], sizes: frozenset[int]) -> StoredTensor:
    outputs, inputs = matrix(parts["weight"])
    scales = parts["weight_scale"]
    group = _group(scales, outputs, inputs, sizes)
    expect(scales, FLOATS, scales.shape)
    if "weight_zero_point" in parts:
        expect(parts["weight_zero_point"], ("I8",), scales.shape)
    return IntegerTensor.of(parts, (outputs, inputs), group)


def translate(fields: Fields) -> Compose:
    """See `personae.engine.checkpoints.quantized`."""
    _known(fields)
    for name in ("sparsity_config", "transform_config"):
        if fields.raw(name):
            raise fields.error(name, f"{as_json(fields.raw(name))} is not supported")
    groups = fields.section("config_groups")
    bits, sizes, blocks = set[int](), set[int](), set[int]()
    for name in _names(groups):
        assert groups is not None
        group = groups.section(name)
        weights = None if group is None else group.section("weights")
        if group is None or weights is None:
            continue
        _known(group)
        bits.add(_bits(weights))
        if "group_size" in weights and weights.raw("group_size") != -1:
            sizes.add(weights.size("group_size"))
        if (block := read_block(weights, "block_structure")) is not None:
            blocks.add(block)
    return partial(compose, bits=frozenset(bits), sizes=frozenset(sizes), blocks=frozenset(blocks))


def _known(fields: Fields) -> None:
    if fields.get("format", FORMATS[0]) not in FORMATS:
        raise fields.error(
            "format", f"{as_json(fields.raw('format'))} is not supported, only {', '.join(FORMATS)}"
        )


def _names(groups: Fields | None) -> list[str]:
    return [] if groups is None else [name for _, name, _ in groups.unread()]


def _bits(weights: Fields) -> int:
    kind, bits = weights.get("type", "int"), weights.size("num_bits")
    strategy: Any = weights.raw("strategy")
    if strategy is not None and strategy not in STRATEGIES:
        raise weights.error("strategy", f"{as_json(strategy)} is not supported, only {', '.join(STRATEGIES)}")
    if not 2 <= bits <= 8 or (kind == "float" and bits not in (4, 8)) or kind not in ("int", "float"):
        raise weights.error("num_bits", f"{bits} of type {as_json(kind)} is not supported")
    return bits
