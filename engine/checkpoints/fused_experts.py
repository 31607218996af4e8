"""Checkpoints that have all experts of a layer as one tensor. Each expert becomes a tensor of its own here,
which is a part of the file's, so that experts have the same names in all families.

gpt-oss also keeps them in MXFP4: blocks of 32 numbers E2M1 with a common power of two. They are dequantized
as they are read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from personae.engine.checkpoints.base import StoredTensor
from personae.engine.config import ModelConfig
from personae.engine.layers.moe import FusedExperts, MoeSpec
from personae.errors import ModelLoadError

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCKS, SCALES, BLOCK = "_blocks", "_scales", 32
_BIAS = "_bias"


def separated(stored: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors, with the experts of fused ones apart. Raises ModelLoadError if one has another shape."""
    found = dict(stored)
    for layer, spec in enumerate(config.layer_specs):
        moe = spec.mlp
        if isinstance(moe, MoeSpec) and moe.fused is not None:
            prefix = f"model.layers.{layer}.{moe.path}"
            found |= dict(_parts(found, moe, moe.fused, prefix, config.hidden_size))
    return found


def _parts(
    stored: dict[str, StoredTensor], moe: MoeSpec, fused: FusedExperts, prefix: str, hidden: int
) -> Iterator[tuple[str, StoredTensor]]:
    """The experts' tensors of one block, by their own names. The fused ones are taken out of `stored`."""
    gate, up, down = moe.names
    wide, narrow = (2 * moe.size, hidden), (hidden, moe.size)
    first, second = (slice(0, None, 2), slice(1, None, 2)) if fused.transposed else _halves(moe.size)
    for file_name, (outputs, inputs), cuts in (
        (fused.gate_up, wide, {gate: first, up: second}),
        (fused.down, narrow, {down: slice(None)}),
    ):
        base = f"{prefix}.{file_name}"
        whole = _take(stored, base, fused, moe.experts, outputs, inputs)
        bias = stored.pop(base + _BIAS, None) if moe.bias else None
        if bias is not None:
            _check(bias, (moe.experts, outputs))
        for expert in range(moe.experts):
            for name, rows in cuts.items():
                own = f"{prefix}.experts.{expert}.{name}"
                if whole is not None:
                    yield f"{own}.weight", whole.part(expert, rows)
                if bias is not None:
                    yield f"{own}.bias", _Fused(bias, None, False, outputs, 0).part(expert, rows)


def _halves(size: int) -> tuple[slice, slice]:
    return slice(0, size), slice(size, None)


def _take(
    stored: dict[str, StoredTensor], base: str, fused: FusedExperts, experts: int, outputs: int, inputs: int
) -> "_Fused | None":
    plain = stored.pop(f"{base}{fused.suffix}", None)
    if plain is not None:
        _check(plain, (experts, inputs, outputs) if fused.transposed else (experts, outputs, inputs))
        return _Fused(plain, None, fused.transposed, outputs, inputs)
    blocks, scales = stored.pop(base + BLOCKS, None), stored.pop(base + SCALES, None)
    if blocks is None or scales is None:
        alone = blocks or scales
        if alone is not None:
            stored[alone.name] = alone  # without the other one it is named as unexpected
        return None
    _check(blocks, (experts, outputs, inputs // BLOCK, BLOCK // 2), "U8")
    _check(scales, (experts, outputs, inputs // BLOCK), "U8")
    return _Fused(blocks, scales, False, outputs, inputs)


def _check(tensor: StoredTensor, shape: tuple[int, ...], dtype: str | None = None) -> None:
    wrong = tensor.dtype != dtype if dtype else not tensor.served
    if tensor.shape != shape or wrong:
        what = f"{list(shape)}{f' {dtype}' if dtype else ''}"
        raise ModelLoadError(f"{tensor.name}: expected {what}, found {list(tensor.shape)} {tensor.dtype}")


@dataclass(frozen=True, slots=True)
class _Fused:
    """A tensor of all experts, with its scales if it is in MXFP4. inputs: 0 for a bias."""

    tensor: StoredTensor
    scales: StoredTensor | None
    transposed: bool
    outputs: int
    inputs: int

    def part(self, expert: int, rows: slice) -> "_Part":
        """The rows of one expert, as a stored tensor."""
        count = len(range(self.outputs)[rows])
        shape = (count, self.inputs) if self.inputs else (count,)
        dtype = self.tensor.dtype if self.scales is None else "BF16"
        share = self.tensor.bytes * count // max(prod(self.tensor.shape[:1]) * self.outputs, 1)
        return _Part(self.tensor.name, self.tensor.file, shape, dtype, True, share, self, expert, rows)

    def read(self, expert: int) -> Tensor:
        """[outputs, inputs], or [outputs] of a bias."""
        values = self.tensor.entry(expert)
        if self.scales is not None:
            scales = self.scales.entry(expert)
            if (scales == 255).any():
                raise ModelLoadError(f"{self.scales.name} has scales that are not finite")
            return mxfp4(values, scales)
        return values.T if self.transposed else values


@dataclass(frozen=True, slots=True)
class _Part(StoredTensor):
    whole: _Fused
    expert: int
    rows: slice

    def read(self) -> Tensor:
        return self.whole.read(self.expert)[self.rows]

    def blocks(self) -> Tensor:
        raise TypeError(f"{self.name} is not quantized in blocks")


def mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """E2M1 * 2^(scale - 127): blocks [..., B, 16] uint8, of which the low four bits come first, and scales
    [..., B] uint8 -> [..., 32 B] float32."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    pairs = torch.stack((table[(blocks & 15).long()], table[(blocks >> 4).long()]), -1).flatten(-2)
    return torch.ldexp(pairs, (scales.int() - 127).unsqueeze(-1)).flatten(-2)
