"""Products with weights in GGUF's blocks: repacked once in an order that GPUs read well, in the file's bits.

The file has each block's numbers one after the other, at odd addresses. Here levels, scales and codes each
have a matrix of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gguf.quants import IQ4_NL, MXFP4
from torch import Tensor

from personae.kernels.decoder import LinearWeights
from personae.kernels.quantized import QuantizedWeight
from personae.kernels.triton.device.blocks import block_linear_kernel
from personae.kernels.triton.sizes import ceil_div, product_tile

_CHUNK = 2**22  # weights that are repacked, or made plain, at a time


@dataclass(frozen=True, slots=True)
class Layout:
    """bits: of a level, whose lowest value stands for -zero. group: inputs that share a code; block: those
    that share a scale. least: whether something is subtracted from each weight. size: bytes of a block in the
    file. Levels of five bits take six here, and those that the file has as places in a table are its numbers,
    in eight."""

    bits: int
    zero: int
    group: int
    block: int
    size: int
    least: bool = False

    @property
    def codes(self) -> bool:
        """Whether groups have codes."""
        return self.group < self.block


LAYOUTS = {
    "Q8_0": Layout(8, 0, 32, 32, 34),
    "Q4_0": Layout(4, 8, 32, 32, 18),
    "Q4_1": Layout(4, 0, 32, 32, 20, least=True),
    "Q4_K": Layout(4, 0, 32, 256, 144, least=True),
    "Q6_K": Layout(6, 32, 16, 256, 210),
    "Q5_0": Layout(6, 16, 32, 32, 22),
    "Q5_1": Layout(6, 0, 32, 32, 24, least=True),
    "Q5_K": Layout(6, 0, 32, 256, 176, least=True),
    "IQ4_NL": Layout(8, 0, 32, 32, 18),
    "IQ4_XS": Layout(8, 0, 32, 256, 136),
    "MXFP4": Layout(8, 0, 32, 32, 17),
}
"""By `QuantizedWeight.kind`."""


@dataclass(frozen=True, slots=True)
class Repacked:
    """A weight [outputs, inputs]; the tensors are those of `block_linear_kernel`, None what a layout has
    not."""

    layout: Layout
    levels: Tensor
    high: Tensor | None
    scales: Tensor
    least: Tensor | None
    codes: Tensor | None
    least_codes: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.levels.shape[0], self.levels.shape[1] * (1 if self.layout.bits == 8 else 2)

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        found = (self.levels, self.high, self.scales, self.least, self.codes, self.least_codes)
        return sum(tensor.nbytes for tensor in found if tensor is not None)

    def plain(self, dtype: torch.dtype) -> Tensor:
        """[outputs, inputs], rounded once."""
        outputs, inputs = self.shape
        made = torch.empty(outputs, inputs, dtype=dtype, device=self.levels.device)
        for first in range(0, outputs, step := max(1, _CHUNK // inputs)):
            made[first : first + step] = self._wide(slice(first, first + step))
        return made

    def _wide(self, own: slice) -> Tensor:
        """Some outputs in float32."""
        layout = self.layout
        level = self.levels[own]
        if layout.bits != 8:
            level = torch.stack((level & 15, level >> 4), -1).flatten(1)
        if self.high is not None:
            four = self.high[own]
            level = level | torch.stack([four >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(1) << 4
        share = layout.block // layout.group
        scale = self.scales[own].float().repeat_interleave(share, 1)
        if self.codes is not None:
            scale = scale * self.codes[own]
        wide = (level.int() - layout.zero).float().view(*scale.shape, layout.group) * scale.unsqueeze(2)
        if self.least is not None:
            least = self.least[own].float().repeat_interleave(share, 1)
            if self.least_codes is not None:
                least = least * self.least_codes[own]
            wide = wide - least.unsqueeze(2)
        flat: Tensor = wide.flatten(1)
        return flat


def repack(kind: str, rows: Tensor, inputs: int) -> Repacked:
    """kind: in `LAYOUTS`. rows: [outputs, bytes] uint8, the blocks of each output as in a GGUF file."""
    layout = LAYOUTS[kind]
    parts = [
        _PARTS[kind](part.view(len(part), -1, layout.size))
        for part in torch.split(rows, max(1, _CHUNK // inputs))
    ]
    levels, high, scales, least, codes, least_codes = (
        None if own[0] is None else torch.cat(own) for own in zip(*parts, strict=True)
    )
    assert levels is not None
    assert scales is not None
    return Repacked(layout, levels, high, scales, least, codes, least_codes)


Parts = tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]


def _halves(blocks: Tensor, at: int) -> Tensor:
    """The float16 numbers at a place of each block: [outputs, blocks]."""
    return blocks[:, :, at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _pairs(levels: Tensor) -> Tensor:
    """Levels of four bits [outputs, ..., inputs] uint8 -> two in a byte, [outputs, all / 2]."""
    flat = levels.flatten(1)
    return flat[:, ::2] | flat[:, 1::2] << 4


def _nibbles(bytes_: Tensor) -> Tensor:
    """[outputs, blocks, n] -> [outputs, blocks, 2 n]: the lower halves of n bytes, then the upper ones."""
    return torch.cat((bytes_ & 15, bytes_ >> 4), -1)


def _q8_0(blocks: Tensor) -> Parts:
    levels = blocks[:, :, 2:].contiguous().view(torch.int8).flatten(1)
    return levels, None, _halves(blocks, 0), None, None, None


def _q4_0(blocks: Tensor) -> Parts:
    return _pairs(_nibbles(blocks[:, :, 2:])), None, _halves(blocks, 0), None, None, None


def _q4_1(blocks: Tensor) -> Parts:
    return _pairs(_nibbles(blocks[:, :, 4:])), None, _halves(blocks, 0), -_halves(blocks, 2), None, None


def _ones(bytes_: Tensor) -> Tensor:
    """The bits of bytes [...], the lowest first: [..., 8]."""
    return bytes_.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=bytes_.device) & 1


def _fours(high: Tensor) -> Tensor:
    """Two bits each [outputs, ..., inputs] uint8 -> four in a byte, [outputs, all / 4]."""
    flat = high.flatten(1)
    return flat[:, ::4] | flat[:, 1::4] << 2 | flat[:, 2::4] << 4 | flat[:, 3::4] << 6


def _q5_0(blocks: Tensor) -> Parts:
    high = _fours(_ones(blocks[:, :, 2:6]))
    return _pairs(_nibbles(blocks[:, :, 6:])), high, _halves(blocks, 0), None, None, None


def _q5_1(blocks: Tensor) -> Parts:
    high = _fours(_ones(blocks[:, :, 4:8]))
    return _pairs(_nibbles(blocks[:, :, 8:])), high, _halves(blocks, 0), -_halves(blocks, 2), None, None


def _small_codes(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and least values of eight groups, six bits each: four as they are, and four in two parts."""
    low, middle, rest = torch.split(blocks[:, :, 4:16], 4, -1)
    codes = torch.cat((low & 63, rest & 15 | low >> 6 << 4), -1)
    least_codes = torch.cat((middle & 63, rest >> 4 | middle >> 6 << 4), -1)
    return codes.flatten(1).view(torch.int8), least_codes.flatten(1).view(torch.int8)


def _q4_k(blocks: Tensor) -> Parts:
    levels = _nibbles(blocks[:, :, 16:].reshape(*blocks.shape[:2], 4, 32))
    return _pairs(levels), None, _halves(blocks, 0), _halves(blocks, 2), *_small_codes(blocks)


def _q5_k(blocks: Tensor) -> Parts:
    levels = _nibbles(blocks[:, :, 48:].reshape(*blocks.shape[:2], 4, 32))
    high = _fours(_ones(blocks[:, :, 16:48]).transpose(2, 3))  # a bit of each byte for each group
    return _pairs(levels), high, _halves(blocks, 0), _halves(blocks, 2), *_small_codes(blocks)


def _q6_k(blocks: Tensor) -> Parts:
    # Of each half of a block: 64 bytes with the lower bits of 128 inputs, 32 with the two above of four times
    # 32 inputs.
    low = _nibbles(blocks[:, :, :128].reshape(*blocks.shape[:2], 2, 64))
    four = blocks[:, :, 128:192].reshape(*blocks.shape[:2], 2, 32)
    high = _fours(torch.cat([four >> shift & 3 for shift in (0, 2, 4, 6)], -1))
    codes = blocks[:, :, 192:208].contiguous().view(torch.int8).flatten(1)
    return _pairs(low), high, _halves(blocks, 208), None, codes, None


def _looked_up(table: Sequence[int], places: Tensor) -> Tensor:
    numbers = torch.tensor(table, dtype=torch.int8, device=places.device)
    return numbers[places.flatten(1).long()]


def _iq4_nl(blocks: Tensor) -> Parts:
    levels = _looked_up(IQ4_NL.kvalues, _nibbles(blocks[:, :, 2:]))
    return levels, None, _halves(blocks, 0), None, None, None


def _iq4_xs(blocks: Tensor) -> Parts:
    levels = _nibbles(blocks[:, :, 8:].reshape(*blocks.shape[:2], 8, 16))
    # Of eight groups, six bits each: the lower four apart from the upper two.
    low = torch.stack((blocks[:, :, 4:8] & 15, blocks[:, :, 4:8] >> 4), -1).flatten(2)
    high = torch.stack([blocks[:, :, 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(2)
    codes = (low | high << 4).view(torch.int8) - 32
    return _looked_up(IQ4_NL.kvalues, levels), None, _halves(blocks, 0), None, codes.flatten(1), None


def _mxfp4(blocks: Tensor) -> Parts:
    exponents = blocks[:, :, 0].int() - 128
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    return _looked_up(MXFP4.kvalues, _nibbles(blocks[:, :, 1:])), None, scales, None, None, None


_PARTS = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}


class BlockLinear:
    """A linear module whose weight stays in a GGUF file's bits, and is widened in registers.

    weight: of a kind in `LAYOUTS`. It is not kept. See `quantized.TritonLinear` about a row's bits.
    """

    def __init__(self, linear: LinearWeights, dtype: torch.dtype) -> None:
        weight = linear.weight
        assert isinstance(weight, QuantizedWeight)
        (rows,) = weight.tensors()
        self.weight, self.bias, self.dtype = repack(weight.kind, rows, weight.inputs), linear.bias, dtype

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, inputs] -> [T, outputs]. The rows of x may be strided."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        weight, layout = self.weight, self.weight.layout
        rows, (outputs, inputs) = x.shape[0], weight.shape
        y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
        if not rows:
            return y
        tile = product_tile(rows, x.dtype)
        levels, scales = weight.levels, weight.scales
        # What a layout has not is not read: any tensor of its type stands for it.
        codes = scales.view(torch.int8) if weight.codes is None else weight.codes
        block_linear_kernel[ceil_div(outputs, tile.columns), ceil_div(rows, tile.rows)](
            x,
            levels,
            levels if weight.high is None else weight.high,
            scales,
            scales if weight.least is None else weight.least,
            codes,
            codes if weight.least_codes is None else weight.least_codes,
            y if self.bias is None else self.bias,
            y,
            rows,
            x.stride(0),
            outputs,
            inputs,
            BITS=layout.bits,
            ZERO=layout.zero,
            GROUP=layout.group,
            BLOCK=layout.block,
            CODES=layout.codes,
            LEAST=layout.least,
            BIAS=self.bias is not None,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            num_warps=4,
            num_stages=tile.stages,
        )
        return y

    def plain(self) -> Tensor:
        """See `PackedLinear`."""
        return self.weight.plain(self.dtype)
