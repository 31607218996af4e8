"""The tensors of GGUF files, with the decoder's names and in its order of rows."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from personae.engine.checkpoints.base import StoredTensor
from personae.engine.checkpoints.gguf.header import Header, TensorInfo
from personae.engine.config import ModelConfig
from personae.engine.layers.attention import AttentionSpec
from personae.engine.quantization.gguf import METHODS
from personae.errors import ModelLoadError

Type = GGMLQuantizationType
SERVED = frozenset(
    {Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1}
    | {Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K}
    | {Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S}
    | {Type.IQ4_NL, Type.IQ4_XS, Type.TQ1_0, Type.TQ2_0, Type.MXFP4, Type.NVFP4}
)
WITHIN_Q8_0 = frozenset({Type.Q5_0, Type.IQ4_NL})
"""Types whose blocks are 32 whole numbers of up to 8 bits, and a float16 that multiplies them."""
FLOATS = frozenset({Type.F32, Type.F16, Type.BF16})
STRETCHING = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
MERGED = {"ffn_up": "mlp.gate_up_proj"}  # if gate and up are one tensor
POST_NORMS = {"ffn_norm": "pre_feedforward_layernorm"}  # if there are norms before and after each half
_OF_LAYER = re.compile(r"blk\.(\d{1,6})\.([a-z_]+)\.(weight|bias)")
_CHUNK = 2**22  # elements that are dequantized at a time


@dataclass(frozen=True, slots=True)
class GgufTensor(StoredTensor):
    """order: for each row, its row in the file; None for the same order."""

    header: Header
    info: TensorInfo
    order: Tensor | None

    def read(self) -> Tensor:
        """See `StoredTensor`: float32."""
        plain = torch.empty(self.shape)
        self.copy_to(plain)
        return plain

    def copy_to(self, place: Tensor) -> None:
        """See `StoredTensor`."""
        rows = self._rows()
        step = max(1, _CHUNK // self.shape[-1])
        for start in range(0, rows.shape[0], step):
            with np.errstate(all="ignore"):
                part = dequantize(_typed(rows[start : start + step], self.info.type), self.info.type)
            if not np.isfinite(part).all():
                raise ModelLoadError(f"{self.header.path.name}: {self.name} has values that are not finite")
            place.view(rows.shape[0], -1)[start : start + step].copy_(torch.from_numpy(part))

    @property
    def kept(self) -> str | None:
        """See `StoredTensor`: the file's own type, or one with more bits that has the same values."""
        return self.dtype if self.dtype in METHODS else "Q8_0" if self.info.type in WITHIN_Q8_0 else None

    def blocks(self, kind: str) -> Tensor:
        """See `StoredTensor`."""
        rows = self._rows()
        if kind == self.dtype:
            return rows
        assert kind == "Q8_0"
        some = max(1, _CHUNK // self.shape[-1])
        return torch.cat([_as_q8_0(part, self.info.type) for part in torch.split(rows, some)])

    def _rows(self) -> Tensor:
        """The file's bytes, [rows, bytes] uint8."""
        rows = self.shape[0] if len(self.shape) > 1 else 1
        raw = torch.from_numpy(np.array(self.header.bytes_of(self.info)))
        raw = raw.view(rows, -1)
        return raw if self.order is None else raw.view(self.order.shape[0], -1)[self.order].view(rows, -1)


def _as_q8_0(rows: Tensor, type: GGMLQuantizationType) -> Tensor:
    """Blocks of 32 inputs with one scale, which comes first, as blocks of Q8_0."""
    _, size = GGML_QUANT_SIZES[type]
    blocks = rows.view(rows.shape[0], -1, size).clone()
    scales = blocks[:, :, :2].clone()
    blocks[:, :, :2] = torch.ones(1, dtype=torch.float16).view(torch.uint8)
    levels = torch.from_numpy(dequantize(blocks.view_as(rows).numpy(), type)).to(torch.int8)
    return torch.cat([scales, levels.view(torch.uint8).view(*scales.shape[:2], 32)], 2).view(len(rows), -1)


def _typed(rows: Tensor, type: GGMLQuantizationType) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]]":
    kinds = {Type.F32: np.float32, Type.F16: np.float16}
    return rows.numpy().view(kinds.get(type, np.uint8))


def named(headers: Iterable[Header], config: ModelConfig, *, permuted: bool) -> dict[str, StoredTensor]:
    """All tensors of the files. Unknown ones keep their own name.

    permuted: see `Architecture`.
    """
    found: dict[str, StoredTensor] = {}
    for header in headers:
        for info in header.tensors.values():
            if info.name in STRETCHING:
                continue
            name = _name(info.name, config)
            if name in found:
                raise ModelLoadError(f"{info.name} is in {header.path.name} and in another file of the model")
            order = _order(name, info, config) if permuted else None
            served = info.type in (SERVED if len(info.shape) == 2 else FLOATS)
            found[name] = GgufTensor(
                info.name,
                str(header.path),
                info.shape,
                info.type.name,
                served,
                info.bytes,
                header,
                info,
                order,
            )
    return found


def _name(name: str, config: ModelConfig) -> str:
    part, _, kind = name.rpartition(".")
    if part in TOP:
        return f"{TOP[part]}.{kind}"
    match = _OF_LAYER.fullmatch(name)
    if match is None:
        return name
    layer, part, kind = match.groups()
    merged = _attention(config).merged
    names = LAYER | (MERGED if merged else {}) | (POST_NORMS if _both_norms(config) else {})
    return f"model.layers.{int(layer)}.{names[part]}.{kind}" if part in names else name


def _attention(config: ModelConfig) -> AttentionSpec:
    """The attention of the first layer. All layers have the same heads."""
    attention = config.layer_specs[0].attention
    assert isinstance(attention, AttentionSpec)
    return attention


def _both_norms(config: ModelConfig) -> bool:
    return config.pre_norms is not None and config.post_norms is not None


def _order(name: str, info: TensorInfo, config: ModelConfig) -> Tensor | None:
    """The order of the rows of q and k. The decoder has a head's first half, then its second; the file
    alternates between the two halves."""
    attention = _attention(config)
    heads = {"q_proj": attention.heads, "k_proj": attention.kv_heads}.get(name.split(".")[-2])
    if heads is None or info.shape[0] != heads * attention.head_dim:
        return None  # a wrong shape is reported later
    rows = torch.arange(info.shape[0]).view(heads, attention.head_dim // 2, 2)
    return rows.transpose(1, 2).reshape(-1)


def factors(header: Header, name: str) -> tuple[float, ...]:
    """A short tensor of float32. Raises ModelLoadError if it is something else."""
    info = header.tensors.get(name)
    if info is None or info.type is not Type.F32 or len(info.shape) != 1:
        raise ModelLoadError(f"{header.path.name} has no vector {name} of F32")
    values = header.bytes_of(info).view(np.float32)
    if not (np.isfinite(values) & (values > 0)).all():
        raise ModelLoadError(f"{header.path.name}: {name} has values that are not numbers over 0")
    return tuple(map(float, values))
