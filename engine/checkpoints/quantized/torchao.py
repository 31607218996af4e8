"""torchao: whole numbers or FP8 with their scales, each part of a weight a tensor of its own in safetensors.

`_weight_qdata` has the values, `_weight_scale` the scales, and `_weight_zero_point` zero points, if there are
some. The class of each weight stands as JSON in the header of its file: W = (q - z) * s for `Int8Tensor` and
`IntxUnpackedToInt8Tensor`, q * s for `Float8Tensor`, and q * s + z for `Int4Tensor`, whose scales are
[groups, outputs], with the first of two inputs in the lower half of a byte. Scales for activations are not
used, as in the other formats.
"""

import json
from functools import cache
from typing import Any

import torch
from safetensors import safe_open
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
)
from personae.engine.checkpoints.quantized.fp8 import compose_fp8
from personae.engine.fields import Fields
from personae.errors import as_json

MEANINGLESS = frozenset(
    [
        *("quant_type", "quant_type_kwargs", "modules_to_not_convert", "include_input_output_embeddings"),
        "untie_embedding_weights",
    ]
)
"""The tensors and the classes in their files say all of it."""
VALUES, SCALES, ZEROS = "_weight_qdata", "_weight_scale", "_weight_zero_point"
WHOLE = ("Int8Tensor", "IntxUnpackedToInt8Tensor")
FP8, INT4 = "Float8Tensor", "Int4Tensor"
_BITS = {f"int{bits}": bits for bits in range(1, 9)}


class WholeTensor(PackedTensor):
    """Whole numbers in int8, of which maybe not all bits are used."""

    __slots__ = ()
    method = "torchao"

    def scales(self) -> Tensor:
        """See `PackedTensor`."""
        return self.parts[SCALES].read().float().view(self.shape[0], -1)

    def zeros(self) -> Tensor | None:
        """The zero points [outputs, groups] int16; None if there are none, or all are 0."""
        stored = self.parts.get(ZEROS)
        found = None if stored is None else stored.read().to(torch.int16).view(self.shape[0], -1)
        return None if found is None or not found.any() else found

    def limits(self) -> tuple[int, int]:
        """See `PackedTensor`."""
        (low, high), zeros = self._values, self.zeros()
        return (low, high) if zeros is None else (low - int(zeros.max()), high - int(zeros.min()))

    @property
    def _values(self) -> tuple[int, int]:
        target = _described(self.parts[VALUES]).get("target_dtype")
        bits = _BITS.get(str(target.get("_data")), 8) if isinstance(target, dict) else 8
        return -(1 << bits - 1), (1 << bits - 1) - 1

    def levels(self) -> Tensor:
        """See `PackedTensor`: int8, or int16 with zero points."""
        values, zeros, (low, high) = self.parts[VALUES].read(), self.zeros(), self._values
        if values.min() < low or values.max() > high:
            raise mistaken(self.parts[VALUES], f"has numbers that are not within {low} and {high}")
        return values if zeros is None else values - zeros.repeat_interleave(self.group, 1)


class ShiftedTensor(PackedTensor):
    """Four bits, and floats that are added in place of zero points, so levels are no whole numbers."""

    __slots__ = ()
    method = "torchao"

    def scales(self) -> Tensor:
        """See `PackedTensor`."""
        return self.parts[SCALES].read().float().T

    def levels(self) -> Tensor:
        """See `PackedTensor`: q + z / s. `read` does not divide."""
        return self.read() / self.scales().repeat_interleave(self.group, 1)

    def read(self) -> Tensor:
        """See `StoredTensor`: float32."""
        packed, shifts = self.parts[VALUES].read(), self.parts[ZEROS].read().float().T
        values = torch.stack((packed << 4 >> 4, packed >> 4), 2).float().view(self.shape[0], -1, self.group)
        return values.mul_(self._finite().unsqueeze(2)).add_(shifts.unsqueeze(2)).view(self.shape)


def _described(values: StoredTensor) -> dict[str, Any]:
    """What the header of the file says of a weight: its attributes, and as "_type" its class. transformers
    renames the tensors of some families when it saves them, but not in the header. Such a weight is what all
    the others are."""
    name = f"{values.name.removesuffix(VALUES)}weight"
    try:
        header = _header(values.file)
        return _attributes(header[name]) if name in header else _common(values.file)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise mistaken(values, f"the header of the file does not say what {name} is") from None


def _attributes(text: str) -> dict[str, Any]:
    found = json.loads(text)
    return {"_type": found["_type"], **found.get("_data", {})}


@cache
def _common(file: str) -> dict[str, Any]:
    """What the header says of all weights of a file. Raises ValueError if they are of several kinds."""
    found = [_attributes(text) for text in _header(file).values() if '"_data"' in text]
    if len({json.dumps((each["_type"], each.get("target_dtype"))) for each in found}) != 1:
        raise ValueError(file)
    return found[0]


@cache
def _header(file: str) -> dict[str, str]:
    with safe_open(file, framework="pt") as opened:
        return opened.metadata() or {}


def compose(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """See `Compose`."""
    _header.cache_clear()  # a file may have changed since
    _common.cache_clear()
    for module in list(modules(stored, VALUES)):
        own = take(stored, module, VALUES, SCALES, ZEROS)
        stored[f"{module}weight"] = _weight(own, module)
    return stored


def _weight(own: dict[str, StoredTensor], module: str) -> StoredTensor:
    need(own, module, SCALES)
    values, scales = own[VALUES], own[SCALES]
    described = _described(values)
    kind = described["_type"]
    if kind not in (*WHOLE, FP8, INT4):
        raise mistaken(values, f"{as_json(kind)} is not supported, only {', '.join((*WHOLE, FP8, INT4))}")
    outputs, inputs = matrix(values)
    if kind == FP8:
        expect(values, ("F8_E4M3",), (outputs, inputs))
        size: int | None = None
        if scales.shape not in ((), (1,), (1, 1), (outputs, 1)):
            match described.get("block_size"):
                case [int(down), int(across)] if down == across:
                    size = down
                case other:
                    raise mistaken(scales, f"blocks of {as_json(other)} are not supported: they are square")
        return compose_fp8({"weight": values, SCALES: scales}, size)
    if kind == INT4:
        need(own, module, ZEROS)
        inputs *= 2
        groups = scales.shape[0] if len(scales.shape) == 2 else 0
        for part in (scales, own[ZEROS]):
            expect(part, FLOATS, (groups, outputs))
        expect(values, ("I8",), (outputs, inputs // 2))
        return ShiftedTensor.of(own, (outputs, inputs), _group(scales, groups, inputs))
    groups = scales.shape[-1] if len(scales.shape) == 2 else 1
    expect(values, ("I8",), (outputs, inputs))
    expect(scales, FLOATS, (outputs, groups), (outputs,))
    if ZEROS in own:
        expect(own[ZEROS], ("I8",), (outputs, groups), (outputs,))
    return WholeTensor.of(own, (outputs, inputs), _group(scales, groups, inputs))


def _group(scales: StoredTensor, groups: int, inputs: int) -> int:
    """How many inputs share a scale."""
    if not groups or inputs % groups:
        raise mistaken(scales, f"{inputs} inputs do not form {groups} groups")
    return inputs // groups


def translate(fields: Fields) -> Compose:
    """See `personae.engine.checkpoints.quantized`."""
    return compose
