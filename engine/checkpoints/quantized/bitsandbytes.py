"""bitsandbytes: four bits (NF4 or FP4) in blocks of the flat matrix, or int8 with a scale for each output.

Four bits: `weight` uint8, the first value in the upper half of a byte; `weight.absmax` one scale for each
block, in double quantization as codes; `weight.quant_map` the 16 values; `weight.quant_state...` JSON. Int8:
`weight` int8, `SCB` the largest value of each output, level 127. The columns of outliers that bitsandbytes
multiplies in 16 bits are rounded in the file as well, so that they need nothing here.
"""

import json
from typing import Any

import torch
from torch import Tensor

from personae.engine.checkpoints.base import StoredTensor
from personae.engine.checkpoints.quantized.base import (
    Compose,
    PackedTensor,
    expect,
    matrix,
    mistaken,
    modules,
    need,
    take,
)
from personae.engine.fields import Fields
from personae.errors import as_json

MEANINGLESS = frozenset(
    [
        *("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "llm_int8_skip_modules"),
        *("llm_int8_threshold", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight"),
        *("bnb_4bit_compute_dtype", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
    ]
)
STATE, KINDS = "weight.quant_state.bitsandbytes__", ("nf4", "fp4")
_LONGEST_STATE = 4096  # bytes of JSON


class FourBitTensor(PackedTensor):
    """Blocks run across rows, so a matrix is dequantized as a whole. `group` is all inputs: the scales are
    in the levels."""

    __slots__ = ()
    method = "bitsandbytes"

    def scales(self) -> Tensor:
        """See `PackedTensor`: whether those of the blocks are finite."""
        return (self._absmax().sum() * 0 + 1).expand(self.shape[0], 1)

    def levels(self) -> Tensor:
        """See `PackedTensor`: W itself."""
        packed, table = self.parts["weight"].read().flatten(), self.parts["weight.quant_map"].read().float()
        values = table[torch.stack((packed >> 4, packed & 15), 1).flatten().int()]
        size: int = self._state()["blocksize"]
        scales = self._absmax().repeat_interleave(size)[: values.numel()]
        return values.mul_(scales).view(self.shape)

    def _absmax(self) -> Tensor:
        absmax = self.parts["weight.absmax"].read()
        if "weight.nested_absmax" not in self.parts:
            return absmax.float()
        state = self._state()
        found = self.parts["weight.nested_quant_map"].read().float()[absmax.int()]
        outer = self.parts["weight.nested_absmax"].read().float()
        found.mul_(outer.repeat_interleave(state["nested_blocksize"])[: found.numel()])
        return found.add_(state["nested_offset"])

    def _state(self) -> dict[str, Any]:
        return _state(next(part for end, part in self.parts.items() if end.startswith(STATE)))


class EightBitTensor(PackedTensor):
    """Whole numbers in int8."""

    __slots__ = ()
    method = "bitsandbytes"

    def scales(self) -> Tensor:
        """See `PackedTensor`."""
        return self.parts["SCB"].read().float().view(-1, 1) / 127

    def limits(self) -> tuple[int, int]:
        """See `PackedTensor`."""
        return -128, 127

    def levels(self) -> Tensor:
        """See `PackedTensor`: int8."""
        return self.parts["weight"].read()

    def read(self) -> Tensor:
        """See `StoredTensor`: with the tool's own order of the products."""
        self._finite()
        return self.levels() * self.parts["SCB"].read().float().view(-1, 1) * (1 / 127)


def _state(part: StoredTensor) -> dict[str, Any]:
    """The JSON with a weight of four bits."""
    if part.dtype != "U8" or len(part.shape) != 1 or part.shape[0] > _LONGEST_STATE:
        raise mistaken(part, f"expected JSON in bytes, found {list(part.shape)} {part.dtype}")
    try:
        state = json.loads(bytes(part.read().tolist()))
    except ValueError as error:
        raise mistaken(part, f"cannot be read as JSON: {error}") from None
    if not isinstance(state, dict):
        raise mistaken(part, "is not a JSON object")
    shape, size, outer = state.get("shape"), state.get("blocksize"), state.get("nested_blocksize", 1)
    sizes = [*shape, size, outer] if isinstance(shape, list) and len(shape) == 2 else [None]
    if not all(type(n) is int and 0 < n < 2**31 for n in sizes):
        raise mistaken(
            part,
            f"has no sizes: shape {as_json(shape)}, blocksize {as_json(size)}, "
            f"nested_blocksize {as_json(outer)}",
        )
    if not isinstance(state.get("nested_offset", 0.0), float | int):
        raise mistaken(part, f"nested_offset is {as_json(state['nested_offset'])}")
    return state


def compose(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """See `Compose`."""
    for module in list(modules(stored, "weight.absmax")):
        own = take(
            stored, module, *("weight", "weight.absmax", "weight.quant_map", *map(STATE.__add__, KINDS))
        )
        own |= take(stored, module, "weight.nested_absmax", "weight.nested_quant_map")
        need(own, module, "weight", "weight.quant_map")
        stored[f"{module}weight"] = _four(own, module)
    for module in list(modules(stored, "SCB")):
        own = take(stored, module, "weight", "SCB")
        take(stored, module, "weight_format")
        need(own, module, "weight")
        outputs, inputs = matrix(own["weight"])
        expect(own["weight"], ("I8",), (outputs, inputs))
        expect(own["SCB"], ("F32", "F16", "BF16"), (outputs,))
        stored[f"{module}weight"] = EightBitTensor.of(own, (outputs, inputs), inputs)
    return stored


def _four(own: dict[str, StoredTensor], module: str) -> StoredTensor:
    states = [part for end, part in own.items() if end.startswith(STATE)]
    if len(states) != 1:
        raise mistaken(own["weight"], f"has {len(states)} states of {' or '.join(KINDS)} beside it")
    state = _state(states[0])
    outputs, inputs = state["shape"]
    count = -(-outputs * inputs // 2)
    blocks = -(-outputs * inputs // state["blocksize"])
    expect(own["weight"], ("U8",), (count, 1), (1, count), (count,))
    expect(own["weight.quant_map"], ("F32",), (16,))
    if "nested_blocksize" in state:
        need(own, module, "weight.nested_absmax", "weight.nested_quant_map")
        expect(own["weight.absmax"], ("U8",), (blocks,))
        expect(own["weight.nested_absmax"], ("F32",), (-(-blocks // state["nested_blocksize"]),))
        expect(own["weight.nested_quant_map"], ("F32",), (256,))
    else:
        # After a forward pass on a CPU, bitsandbytes saves another order of values, and these in bfloat16.
        expect(own["weight.absmax"], ("F32",), (blocks,))
    return FourBitTensor.of(own, (outputs, inputs), inputs)


def translate(fields: Fields) -> Compose:
    """See `personae.engine.checkpoints.quantized`."""
    if fields.get("bnb_4bit_quant_storage", "uint8") != "uint8":
        storage = fields.raw("bnb_4bit_quant_storage")
        raise fields.error("bnb_4bit_quant_storage", f"{as_json(storage)} is not supported, only uint8")
    return compose
