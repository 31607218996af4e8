"""AWQ in its layout `gemm`, as AutoAWQ, GPTQModel and AutoRound write it: four bits, packed along outputs.

`qweight` int32 [inputs, outputs / 8], `qzeros` int32 [groups, outputs / 8], `scales` [groups, outputs]:
W^T = (q - z) * scales. A word's fields hold the outputs 0, 2, 4, 6, 1, 3, 5, 7 of its eight.
"""

from functools import partial

import torch
from torch import Tensor

from personae.engine.checkpoints.base import StoredTensor
from personae.engine.checkpoints.quantized.base import (
    FLOATS,
    Compose,
    PackedTensor,
    expect,
    group_size,
    matrix,
    modules,
    need,
    take,
    unpack,
)
from personae.engine.checkpoints.quantized.gptq import MEANINGLESS as GPTQ_MEANINGLESS
from personae.engine.checkpoints.quantized.gptq import read_bits, read_group
from personae.engine.fields import Fields
from personae.errors import as_json

MEANINGLESS = GPTQ_MEANINGLESS | {"zero_point", "exllama_config", "do_fuse", "fuse_max_seq_len"}
_FIELDS = [0, 4, 1, 5, 2, 6, 3, 7]  # the field of each of a word's outputs


class AwqTensor(PackedTensor):
    """See the file's docstring."""

    __slots__ = ()
    method = "awq"

    def scales(self) -> Tensor:
        """See `PackedTensor`."""
        return self.parts["scales"].read().float().T.contiguous()

    def limits(self) -> tuple[int, int]:
        """See `PackedTensor`."""
        zeros = _in_order(self.parts["qzeros"].read())
        return -int(zeros.max()), 15 - int(zeros.min())

    def levels(self) -> Tensor:
        """See `PackedTensor`: int8."""
        zeros = _in_order(self.parts["qzeros"].read()).to(torch.int8)
        groups = torch.arange(self.shape[1]) // self.group
        return _in_order(self.parts["qweight"].read()).to(torch.int8).sub_(zeros[groups]).T.contiguous()


def _in_order(words: Tensor) -> Tensor:
    """[rows, words] int32 -> [rows, outputs] uint8."""
    fields = unpack(words, 4, words.shape[1] * 8).view(words.shape[0], -1, 8)
    return fields[:, :, _FIELDS].view(words.shape[0], -1)


def compose(stored: dict[str, StoredTensor], size: int) -> dict[str, StoredTensor]:
    """See `Compose`. size: of a group, or -1."""
    for module in list(modules(stored, "qweight")):
        parts = take(stored, module, "qweight", "qzeros", "scales")
        need(parts, module, "qzeros", "scales")
        inputs, words = matrix(parts["qweight"])
        group = group_size(size, inputs)
        groups = -(-inputs // group)
        expect(parts["qweight"], ("I32",), (inputs, words))
        expect(parts["qzeros"], ("I32",), (groups, words))
        expect(parts["scales"], FLOATS, (groups, words * 8))
        stored[f"{module}weight"] = AwqTensor.of(parts, (words * 8, inputs), group)
    return stored


def translate(fields: Fields) -> Compose:
    """See `personae.engine.checkpoints.quantized`."""
    for name in ("version", "checkpoint_format", "format"):
        if fields.get(name, "gemm").lower() != "gemm":
            raise fields.error(name, f"{as_json(fields.raw(name))} is not supported, only gemm")
    for name, only in (("method", "awq"), ("pack_dtype", "int32"), ("data_type", "int")):
        if fields.get(name, only) != only:
            raise fields.error(name, f"{as_json(fields.raw(name))} is not supported, only {only}")
    read_bits(fields, (4,))
    return partial(compose, size=read_group(fields))
