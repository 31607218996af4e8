"""GPTQ, as AutoGPTQ, GPTQModel and AutoRound write it: integers of 2, 3, 4 or 8 bits, packed along inputs.

`qweight` int32 [inputs * bits / 32, outputs], `qzeros` int32 [groups, outputs * bits / 32], `scales` [groups,
outputs], `g_idx` int32 [inputs]: W^T = (q - z[g_idx]) * scales[g_idx]. Version 1 (`gptq`) stores each word of
zero points minus one in every field, with borrows between the fields; version 2 (`gptq_v2`) as they are.
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
    mistaken,
    modules,
    need,
    take,
    unpack,
)
from personae.engine.fields import Fields
from personae.errors import as_json

BITS = (2, 3, 4, 8)
MEANINGLESS = frozenset(
    [
        # How the values were found.
        *("desc_act", "sym", "static_groups", "damp_percent", "true_sequential", "act_group_aware", "meta"),
        *("dataset", "tokenizer", "model_seqlen", "batch_size", "max_input_length", "cache_block_outputs"),
        *("block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize"),
        *("quantizer", "model_name_or_path", "model_file_base_name", "lm_head", "pad_token_id", "mse"),
        # Which kernels multiply.
        *("use_exllama", "exllama_config", "disable_exllama", "use_cuda_fp16", "backend", "max_input_length"),
        # AutoRound's notes.
        *("autoround_version", "provider", "enable_quanted_input", "to_quant_block_names", "iters", "lr"),
        *("minmax_lr", "nsamples", "seqlen", "low_gpu_mem_usage", "enable_minmax_tuning", "scale_dtype"),
        *("enable_norm_bias_tuning", "gradient_accumulate_steps", "super_bits", "super_group_size"),
        "modules_to_not_convert",
    ]
)
"""Keys that change nothing about what the tensors mean."""


class GptqTensor(PackedTensor):
    """See the file's docstring. A zero point of the bits' middle, which symmetric quantization has, leaves
    levels of as many bits."""

    __slots__ = ()
    method = "gptq"
    second = False  # version 2

    @property
    def bits(self) -> int:
        """Of a value."""
        return self.parts["qweight"].shape[0] * 32 // self.shape[1]

    def scales(self) -> Tensor:
        """See `PackedTensor`."""
        return self.parts["scales"].read().float().T.contiguous()

    def zeros(self) -> Tensor:
        """[outputs, groups] int16."""
        words, bits = self.parts["qzeros"].read(), self.bits
        if not self.second and 8 % bits == 0:
            ones = sum(1 << shift for shift in range(0, 32, bits))
            words = (words.long() + ones & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)
        zeros = unpack(words, bits, self.shape[0]).short()
        return (zeros if self.second or 8 % bits == 0 else zeros + 1).T

    def limits(self) -> tuple[int, int]:
        """See `PackedTensor`."""
        zeros = self.zeros()
        return -int(zeros.max()), (1 << self.bits) - 1 - int(zeros.min())

    def groups(self) -> Tensor | None:
        """See `PackedTensor`: those of `g_idx`, unless neighbours form the groups."""
        if "g_idx" not in self.parts:
            return None
        groups, (inputs, count) = self.parts["g_idx"].read().long(), (self.shape[1], self._group_count)
        if groups.min() < 0 or groups.max() >= count:
            raise mistaken(self.parts["g_idx"], f"names groups that are not among the {count} of the scales")
        return None if groups.equal(torch.arange(inputs) // self.group) else groups

    @property
    def _group_count(self) -> int:
        return self.parts["scales"].shape[0]

    def levels(self) -> Tensor:
        """See `PackedTensor`: int16."""
        values = unpack(self.parts["qweight"].read().T, self.bits, self.shape[1]).short()
        groups = self.groups()
        if groups is None:
            groups = torch.arange(self.shape[1]) // self.group
        return values.sub_(self.zeros()[:, groups])


class Gptq2Tensor(GptqTensor):
    """Version 2: zero points as they are."""

    __slots__ = ()
    second = True


def compose(
    stored: dict[str, StoredTensor], kind: type[GptqTensor], bits: int, size: int, *, varied: bool
) -> dict[str, StoredTensor]:
    """See `Compose`. size: of a group, or -1. varied: modules may have other bits and groups."""
    for module in list(modules(stored, "qweight")):
        parts = take(stored, module, "qweight", "qzeros", "scales", "g_idx")
        need(parts, module, "qzeros", "scales")
        packed, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
        rows, outputs = matrix(packed)
        groups, words = matrix(zeros)
        own = words * 32 // outputs
        if own not in BITS or (own != bits and not varied):
            raise mistaken(
                zeros, f"has {words} words for {outputs} outputs, which is not {bits} bits for each"
            )
        inputs = rows * 32 // own
        expect(packed, ("I32",), (rows, outputs))
        expect(zeros, ("I32",), (groups, -(-outputs * own // 32)))
        expect(scales, FLOATS, (groups, outputs))
        if "g_idx" in parts:
            expect(parts["g_idx"], ("I32", "I64"), (inputs,))
        group = -(-inputs // groups) if varied else group_size(size, inputs)
        if groups != -(-inputs // group):
            raise mistaken(
                scales, f"has {groups} groups, but {inputs} inputs in groups of {group} have others"
            )
        stored[f"{module}weight"] = kind.of(parts, (outputs, inputs), group)
    return stored


def translate(fields: Fields) -> Compose:
    """See `personae.engine.checkpoints.quantized`."""
    version = fields.get("checkpoint_format", "") or fields.get("format", "") or "gptq"
    for name in ("checkpoint_format", "format"):
        if fields.get(name, version) not in ("gptq", "gptq_v2"):
            raise fields.error(name, f"{as_json(fields.raw(name))} is not supported, only gptq and gptq_v2")
    if fields.get("method", "gptq") != "gptq":
        raise fields.error("method", f"{as_json(fields.raw('method'))} is not supported, only gptq")
    if fields.get("pack_dtype", "int32") != "int32":
        raise fields.error("pack_dtype", f"{as_json(fields.raw('pack_dtype'))} is not supported, only int32")
    if fields.get("is_marlin_format", False):
        raise fields.error("is_marlin_format", "weights in Marlin's own order are not supported")
    if fields.get("data_type", "int") != "int":
        raise fields.error("data_type", f"{as_json(fields.raw('data_type'))} is not supported, only int")
    varied = bool(fields.raw("dynamic")) or bool(fields.raw("extra_config"))
    kind = Gptq2Tensor if version == "gptq_v2" else GptqTensor
    return partial(compose, kind=kind, bits=read_bits(fields), size=read_group(fields), varied=varied)


def read_bits(fields: Fields, allowed: tuple[int, ...] = BITS) -> int:
    """The bits of a value."""
    bits = fields.size("bits")
    if bits not in allowed:
        raise fields.error("bits", f"{bits} is not supported, only {', '.join(map(str, allowed))}")
    return bits


def read_group(fields: Fields) -> int:
    """The inputs of a group, or -1 for all."""
    return -1 if fields.raw("group_size") in (-1, None) else fields.size("group_size")
