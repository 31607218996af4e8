"""The tensors of GGUF files, with the decoder's names and in its order of rows."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from personae.engine.checkpoints.base import StoredTensor
from personae.engine.checkpoints.gguf.header import Header, TensorInfo
from personae.engine.checkpoints.rows import joined
from personae.engine.config import ModelConfig
from personae.engine.layers.altup import AltUpSpec
from personae.engine.layers.attention import AttentionSpec
from personae.engine.layers.block import BlockSpec, LayerSpec
from personae.engine.layers.delta_net import DeltaNetSpec
from personae.engine.layers.dense_and_experts import DenseAndExpertsSpec, experts_of
from personae.engine.layers.latent_attention import LatentAttentionSpec
from personae.engine.layers.latent_experts import INTO, OUT, LatentExpertsSpec
from personae.engine.layers.mamba import MambaSpec
from personae.engine.layers.mlp import GATED, MlpSpec
from personae.engine.layers.moe import MoeSpec
from personae.engine.layers.parallel import side_by_side
from personae.engine.layers.per_layer_embedding import GATE, PROJECTION, PerLayerInputSpec
from personae.engine.layers.short_convolution import ShortConvolutionSpec
from personae.engine.quantization.base import PER_LAYER
from personae.engine.quantization.gguf import METHODS
from personae.errors import ModelLoadError

Type = GGMLQuantizationType
SERVED = frozenset(
    {Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1}
    | {Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K}
    | {Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S}
    | {Type.IQ4_NL, Type.IQ4_XS, Type.TQ1_0, Type.TQ2_0, Type.MXFP4, Type.NVFP4}
)
WITHIN_Q8_0 = frozenset({Type.Q8_0, Type.Q4_0, Type.Q5_0, Type.IQ4_NL})
"""Types whose blocks are 32 whole numbers of up to 8 bits, and a float16 that multiplies them."""
FLOATS = frozenset({Type.F32, Type.F16, Type.BF16})
STRETCHING = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

TOP = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "per_layer_token_embd": PER_LAYER,
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
FINAL_NORMS = ("output_norm", "token_embd_norm")  # the second is LFM2's
SINKS = "attn_sinks.weight"
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")  # tensors of all experts of a layer
GATES_AND_UPS = "ffn_gate_up_exps"  # the rows of gate, then those of up, of each expert
BESIDE_EXPERTS = {  # the norms of an MLP and experts in one half of a layer
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
}
PER_LAYER_INPUT = {"inp_gate": GATE, "proj": PROJECTION, "post_norm": "post_per_layer_input_norm"}
STREAMS = {  # several residual streams
    "altup_correct_coef": "altup.correction_coefs",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
STREAM_PROJECTIONS = {
    "altup_proj": "model.altup_projections",
    "altup_unembd_proj": "model.altup_unembed_projections",
}
OF_LAYERS = {  # vectors whose names have no ending
    "layer_output_scale.weight": "layer_scalar",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    SINKS: "self_attn.sinks",
}
SHARED = ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")
ROUTER, SHARED_GATE, CORRECTION = "ffn_gate_inp", "ffn_gate_inp_shexp", "exp_probs_b"
BARE = {CORRECTION: "bias", "ffn_norm": "weight"}  # without an ending: Hunyuan 3's and Falcon-H1's
KEYS, VALUES = "k_b_proj", "v_b_proj"  # of each head, which newer files have apart
LATENT_EXPERTS = {"ffn_latent_down": INTO, "ffn_latent_up": OUT}
MLP_PARTS = ("ffn_gate", "ffn_up", "ffn_down")
LATENT = {
    "attn_q": "q_proj",
    "attn_q_a": "q_a_proj",
    "attn_q_a_norm": "q_a_layernorm",
    "attn_q_b": "q_b_proj",
    "attn_kv_a_mqa": "kv_a_proj_with_mqa",
    "attn_kv_a_norm": "kv_a_layernorm",
    "attn_kv_b": "kv_b_proj",
    "attn_k_b": KEYS,
    "attn_v_b": VALUES,
    "attn_output": "o_proj",
}
CONVOLUTIONS = ("shortconv.conv", "ssm_conv1d")
DELTA_NET = {
    "attn_qkv": "in_proj_qkv",
    "attn_gate": "in_proj_z",
    "ssm_beta": "in_proj_b",
    "ssm_alpha": "in_proj_a",
    "ssm_in": "in_proj_qkvz",
    "ssm_ba": "in_proj_ba",
    "ssm_conv1d": "conv1d",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
MAMBA = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
STATE_VECTORS = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}  # the first is -exp(A_log)
VECTORS_OF_STATES = (".A_log", ".D", ".mamba.norm.weight", ".mixer.norm.weight")
_OF_LAYER = re.compile(r"blk\.(\d{1,6})\.([a-z0-9_.]+)\.(weight|bias|scale)")
_ANY_OF_LAYER = re.compile(r"blk\.(\d{1,6})\.")
_CHUNK = 2**22  # elements that are dequantized at a time


@dataclass(frozen=True, slots=True)
class GgufTensor(StoredTensor):
    """order: for each row, its row in the file; None for the same order. columns: the same for columns, which
    move in runs of `run`. part_of: which part of the file's tensor it is, and of how many, along the first
    dimension. logarithm: the file has -exp of it."""

    header: Header
    info: TensorInfo
    order: Tensor | None = None
    part_of: tuple[int, int] = (0, 1)
    columns: Tensor | None = None
    run: int = 0
    logarithm: bool = False

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
                part = np.log(-part) if self.logarithm else part
            if not np.isfinite(part).all():
                raise ModelLoadError(f"{self.header.path.name}: {self.name} has values that are not finite")
            plain = torch.from_numpy(part)
            if self.columns is not None:
                plain = plain[:, self.columns]
            place.view(rows.shape[0], -1)[start : start + step].copy_(plain)

    @property
    def kept(self) -> str | None:
        """See `StoredTensor`; None if blocks would have to be cut."""
        return self.dtype if self.dtype in METHODS and not self._cut else None

    @property
    def within(self) -> str | None:
        """See `StoredTensor`."""
        return "Q8_0" if self.info.type in WITHIN_Q8_0 and not self._cut else None

    @property
    def _cut(self) -> bool:
        return self.columns is not None and self.run % GGML_QUANT_SIZES[self.info.type][0] != 0

    def blocks(self, kind: str) -> Tensor:
        """See `StoredTensor`."""
        rows = self._rows()
        if kind != self.dtype:
            assert kind == "Q8_0"
            some = max(1, _CHUNK // self.shape[-1])
            rows = torch.cat([_as_q8_0(part, self.info.type) for part in torch.split(rows, some)])
        if self.columns is None:
            return rows
        elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        places = self.columns[::elements] // elements
        return rows.view(len(rows), -1, size)[:, places].reshape(len(rows), -1)

    def _rows(self) -> Tensor:
        """The file's bytes, [rows, bytes] uint8."""
        rows = self.shape[0] if len(self.shape) > 1 else 1
        index, parts = self.part_of
        own = self.header.bytes_of(self.info).reshape(parts, -1)[index]
        raw = torch.from_numpy(np.array(own)).view(rows, -1)
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


def named(
    headers: Iterable[Header], config: ModelConfig, *, permuted: bool = False, tiled: bool = False
) -> dict[str, StoredTensor]:
    """All tensors of the files. Unknown ones keep their own name.

    permuted, tiled: see `Architecture`.
    """
    found: dict[str, StoredTensor] = {}
    for header in headers:
        for info in header.tensors.values():
            if info.name in STRETCHING or _further(info.name, config):
                continue
            for name, tensor in _tensors(header, info, config, permuted=permuted, tiled=tiled):
                if name in found:
                    raise ModelLoadError(
                        f"{info.name} is in {header.path.name} and in another file of the model"
                    )
                found[name] = tensor
    for layer, spec in enumerate(config.layer_specs):
        if isinstance(spec.attention, LatentAttentionSpec):
            _join(found, f"model.layers.{layer}.self_attn", spec.attention)
        if isinstance(spec.attention, DeltaNetSpec) and spec.attention.interleaved:
            _interleave(found, f"model.layers.{layer}.linear_attn", spec.attention)
        for mlp in _merged_mlps(spec):
            _merge(found, f"model.layers.{layer}.{mlp.path}", mlp)
    return found


def _interleave(found: dict[str, StoredTensor], prefix: str, spec: DeltaNetSpec) -> None:
    """Puts in_proj_qkvz in the place of its two parts, if the file has those. It has q, k, v and z of one key
    head after the other."""
    names = [f"{prefix}.{part}.weight" for part in ("in_proj_qkv", "in_proj_z")]
    parts = [found[name] for name in names if name in found]
    if len(parts) < 2:
        return  # one without the other is reported later, as unexpected
    for tensor, rows in zip(parts, (spec.mixed, spec.inner), strict=True):
        if len(tensor.shape) != 2 or tensor.shape[0] != rows:
            raise ModelLoadError(f"{tensor.name}: expected {rows} rows, found {list(tensor.shape)}")
    keys, inner = spec.key_heads * spec.key_dim, spec.inner
    order = torch.split(torch.arange(spec.mixed + inner), [keys, keys, inner, inner])
    own = torch.cat([part.view(spec.key_heads, -1) for part in order], 1).flatten()
    for name in names:
        del found[name]
    found[f"{prefix}.in_proj_qkvz.weight"] = joined(parts, own)


def _merged_mlps(spec: LayerSpec) -> Iterator[MlpSpec]:
    """The layer's MLPs whose gate and up are one tensor in the checkpoint, and two in the file."""
    mlp = spec.mlp.shared if isinstance(spec.mlp, MoeSpec | LatentExpertsSpec) else spec.mlp
    if isinstance(mlp, MlpSpec) and mlp.merged and mlp.names is not None:
        yield mlp


def _merge(found: dict[str, StoredTensor], prefix: str, mlp: MlpSpec) -> None:
    """Puts gate and up in the place of the two, if the file has both. An up without a gate is both."""
    whole = f"{prefix}.{mlp.modules[0][0]}.weight"
    parts = [tensor for part in GATED[:2] if (tensor := found.get(f"{prefix}.{part}.weight")) is not None]
    if len(parts) == 2 and parts[0].shape == parts[1].shape and len(parts[0].shape) == 2:
        for part in GATED[:2]:
            del found[f"{prefix}.{part}.weight"]
        found[whole] = joined(parts)
    elif len(parts) == 1 and (both := found.pop(f"{prefix}.{GATED[1]}.weight", None)) is not None:
        found[whole] = both


def _join(found: dict[str, StoredTensor], prefix: str, spec: LatentAttentionSpec) -> None:
    """Puts kv_b_proj in the place of its two parts, if the file has those."""
    keys, values = (found.get(f"{prefix}.{part}.weight") for part in (KEYS, VALUES))
    if keys is None or values is None:
        return  # one without the other is reported later, as unexpected
    shapes = (spec.heads, spec.latent, spec.plain_dim), (spec.heads, spec.value_dim, spec.latent)
    for tensor, shape in zip((keys, values), shapes, strict=True):
        if tensor.shape != shape:
            raise ModelLoadError(f"{tensor.name}: expected {list(shape)}, found {list(tensor.shape)}")
    del found[f"{prefix}.{KEYS}.weight"], found[f"{prefix}.{VALUES}.weight"]
    found[f"{prefix}.kv_b_proj.weight"] = _KeysAndValues(
        keys.name,
        keys.file,
        (spec.heads * (spec.plain_dim + spec.value_dim), spec.latent),
        keys.dtype,
        keys.served and values.served,
        keys.bytes + values.bytes,
        keys,
        values,
    )


@dataclass(frozen=True, slots=True)
class _KeysAndValues(StoredTensor):
    """kv_b_proj of its parts, `keys` [heads, latent, plain_dim] and `values` [heads, value_dim, latent]."""

    keys: StoredTensor
    values: StoredTensor

    def read(self) -> Tensor:
        """See `StoredTensor`."""
        parts = self.keys.read().transpose(1, 2), self.values.read()
        return torch.cat(parts, 1).reshape(self.shape)


def _further(name: str, config: ModelConfig) -> bool:
    """Whether the tensor is of a layer that predicts further tokens, which the decoder does without."""
    match = _ANY_OF_LAYER.match(name)
    return match is not None and config.layers <= int(match[1]) < config.layers + config.mtp_layers


def _tensors(
    header: Header, info: TensorInfo, config: ModelConfig, *, permuted: bool, tiled: bool
) -> Iterator[tuple[str, StoredTensor]]:
    """The decoder's tensors that one of the file becomes, by their names there."""
    names = _names(info.name, config)
    cut = 2 if f".{GATES_AND_UPS}." in info.name else 1
    parts = "experts" if "_exps." in info.name else "matrices"
    if len(names) > 1 and (info.shape[0] * cut != len(names) or info.shape[1] % cut):
        raise ModelLoadError(
            f"{header.path.name}: {info.name}: expected {len(names) // cut} {parts}, found {list(info.shape)}"
        )
    shape = (info.shape[1] // cut, *info.shape[2:]) if len(names) > 1 else info.shape
    if info.name.endswith(f".{SHARED_GATE}.weight") and len(shape) == 1:
        shape = (1, *shape)  # a matrix of one row
    if info.name.endswith(tuple(f".{name}.weight" for name in CONVOLUTIONS)) and len(shape) == 2:
        shape = (shape[0], 1, shape[1])
    if names[0].endswith(VECTORS_OF_STATES):
        shape = (prod(shape),)  # the file may have them as matrices
    served = info.type in (FLOATS if len(shape) == 1 else SERVED)
    for index, name in enumerate(names):
        order = _order(name, info, config) if permuted else None
        columns, run = None, 0
        if tiled and ".linear_attn." in name:
            order, columns, run = _untiled(name, info, config)
        yield (
            name,
            GgufTensor(
                info.name,
                str(header.path),
                shape,
                info.type.name,
                served,
                info.bytes // len(names),
                header,
                info,
                order,
                (index, len(names)),
                columns,
                run,
                logarithm=name.endswith(".A_log"),
            ),
        )


def _names(name: str, config: ModelConfig) -> list[str]:
    """The decoder's names for a tensor: one, or one for each expert."""
    part, _, kind = name.rpartition(".")
    if kind in BARE:
        part, kind = name, BARE[kind]
        name = f"{part}.{kind}"
    if part in TOP or part in FINAL_NORMS:
        return [f"{TOP.get(part, config.final_norm)}.{kind}"]
    if part in STREAM_PROJECTIONS and isinstance(altup := config.layer_specs[0].further, AltUpSpec):
        return [f"{STREAM_PROJECTIONS[part]}.{stream}.{kind}" for stream in range(altup.streams - 1)]
    match = _OF_LAYER.fullmatch(name)
    if match is None:
        return [_state_vector(name, config)]
    layer, part, kind = int(match[1]), match[2], match[3]
    prefix = f"model.layers.{layer}"
    if f"{part}.{kind}" in OF_LAYERS:
        return [f"{prefix}.{OF_LAYERS[f'{part}.{kind}']}"]
    if f"{part}.{kind}" in STATE_VECTORS:
        return [_state_vector(name, config)]
    spec = config.layer_specs[layer] if layer < config.layers else None
    moe = experts_of(spec) if spec is not None else None
    if moe is not None and spec is not None:
        within = moe.within(prefix)
        if part in EXPERTS and kind != "scale":
            own = moe.names[EXPERTS.index(part)]
            return [f"{within}.experts.{expert}.{own}.{kind}" for expert in range(moe.experts)]
        if part == GATES_AND_UPS:
            return [
                f"{within}.experts.{expert}.{own}.{kind}"
                for expert in range(moe.experts)
                for own in moe.names[:2]
            ]
        if part == CORRECTION and moe.correction:
            return [f"{within}.{moe.correction}"]
        if (scale := {ROUTER: moe.router_scale, EXPERTS[2]: moe.expert_scale}.get(part)) and kind == "scale":
            return [f"{within}.{scale}"]
        if isinstance(spec.mlp, LatentExpertsSpec) and part in LATENT_EXPERTS:
            return [f"{within}.{LATENT_EXPERTS[part]}.{kind}"]
        shared = spec.mlp.shared if isinstance(spec.mlp, LatentExpertsSpec) else moe.shared
        if part in (others := dict(_of_moe(moe, shared, prefix))):
            return [f"{others[part]}.{kind}"]
    found = dict(_of_layer(config, spec)) if spec is not None else {}
    return [f"{prefix}.{found[part]}.{kind}" if part in found else name]


def _state_vector(name: str, config: ModelConfig) -> str:
    """The decoder's name for a vector of a layer with states. Others keep their own."""
    match = _ANY_OF_LAYER.match(name)
    part = STATE_VECTORS.get(name[match.end() :]) if match is not None else None
    if match is None or part is None or int(match[1]) >= config.layers:
        return name
    for block in side_by_side(config.layer_specs[int(match[1])].attention):
        if isinstance(block, DeltaNetSpec | MambaSpec):
            path = block.path if isinstance(block, MambaSpec) else "linear_attn"
            return f"model.layers.{match[1]}.{path}.{part}"
    return name


def _of_layer(config: ModelConfig, spec: LayerSpec) -> Iterator[tuple[str, str]]:
    """The names of a layer's norms and modules, but for those of experts."""
    if config.pre_norms is not None:
        yield from zip(("attn_norm", "ffn_norm"), config.pre_norms, strict=True)
    if config.post_norms is not None:
        yield from zip(("post_attention_norm", "post_ffw_norm"), config.post_norms, strict=True)
    elif config.pre_norms is not None:
        yield "post_attention_norm", config.pre_norms[1]  # gpt-oss, GLM-4.5 and Seed-OSS
    for block in side_by_side(spec.attention):
        yield from _of_attention(block)
    mlp = spec.mlp
    if isinstance(spec.further, DenseAndExpertsSpec):
        mlp = spec.further.dense
        yield from BESIDE_EXPERTS.items()
    elif isinstance(spec.further, PerLayerInputSpec | AltUpSpec):
        yield from PER_LAYER_INPUT.items()
        yield from STREAMS.items() if isinstance(spec.further, AltUpSpec) else ()
    if isinstance(mlp, MlpSpec):
        split = [merged.path for merged in _merged_mlps(spec)]
        modules = (*GATED[:2], mlp.modules[1]) if split else mlp.names or GATED
        for part, own in zip(
            MLP_PARTS[-len(modules) :], modules, strict=True
        ):  # without a gate a file has none
            yield part, f"{mlp.path}.{own}"
        if (mlp.merged and not split) or _merged(spec):
            yield "ffn_up", f"{mlp.path}.gate_up_proj"


def _of_attention(block: BlockSpec) -> Iterator[tuple[str, str]]:
    """The names of attention, or of what is in its place."""
    if isinstance(block, AttentionSpec):
        names = {"attn_output": block.output, "attn_qkv": "qkv_proj"}
        if block.norms is not None:
            names |= dict(zip(("attn_q_norm", "attn_k_norm"), block.norms, strict=True))
        for part, own in (names | {f"attn_{part}": f"{part}_proj" for part in "qkv"}).items():
            yield part, f"{block.path}.{own}"
    elif isinstance(block, LatentAttentionSpec):
        for part, own in LATENT.items():
            yield part, f"self_attn.{own}"
    elif isinstance(block, DeltaNetSpec):
        for part, own in DELTA_NET.items():
            yield part, f"linear_attn.{own}"
    elif isinstance(block, MambaSpec):
        for part, own in MAMBA.items():
            yield part, f"{block.path}.{own}"
    elif isinstance(block, ShortConvolutionSpec):
        for part in ("conv", "in_proj", "out_proj"):
            yield f"shortconv.{part}", f"conv.{part}"


def _of_moe(moe: MoeSpec, shared: MlpSpec | None, prefix: str) -> Iterator[tuple[str, str]]:
    """The whole names of what a layer with experts has besides them."""
    within = moe.within(prefix)
    yield ROUTER, f"{within}.{moe.router}"
    if shared is not None:
        names = (*GATED[:2], shared.modules[1]) if shared.merged else shared.names or GATED
        for part, own in zip(SHARED, names, strict=True):
            yield part, f"{prefix}.{shared.path}.{own}"
    if moe.shared_gate is not None:
        yield SHARED_GATE, f"{within}.{moe.shared_gate}"


def _merged(spec: LayerSpec) -> bool:
    """Whether gate and up are one tensor, as q, k and v are."""
    return isinstance(spec.attention, AttentionSpec) and spec.attention.merged


def _order(name: str, info: TensorInfo, config: ModelConfig) -> Tensor | None:
    """The order of the rows of q and k. The decoder has a head's first half, then its second; the file
    alternates between the two halves."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    attention = (
        config.layer_specs[int(layer[1])].attention if layer and int(layer[1]) < config.layers else None
    )
    if not isinstance(attention, AttentionSpec):
        return None
    heads = {"q_proj": attention.heads, "k_proj": attention.kv_heads}.get(name.split(".")[-2])
    if heads is None or info.shape[0] != heads * attention.head_dim:
        return None  # a wrong shape is reported later
    rows = torch.arange(info.shape[0]).view(heads, attention.head_dim // 2, 2)
    return rows.transpose(1, 2).reshape(-1)


def _untiled(name: str, info: TensorInfo, config: ModelConfig) -> tuple[Tensor | None, Tensor | None, int]:
    """The order of rows and of columns, and the length of the runs of columns. The decoder has the value
    heads of a key head next to one another, and the file has the first ones of all key heads first."""
    spec = config.layer_specs[int(name.split(".")[2])].attention
    assert isinstance(spec, DeltaNetSpec)
    heads = torch.arange(spec.heads).view(-1, spec.key_heads).T.flatten()

    def places(width: int, before: int = 0) -> Tensor:
        own = heads[:, None] * width + torch.arange(width)
        return torch.cat((torch.arange(before), own.flatten() + before))

    part = name.split(".")[4]
    if spec.heads == spec.key_heads or part == "norm":
        return None, None, 0
    if part == "out_proj":
        return None, places(spec.value_dim), spec.value_dim
    if part in ("in_proj_qkv", "conv1d"):
        order = places(spec.value_dim, spec.mixed - spec.inner)
    else:
        order = places(spec.value_dim if part == "in_proj_z" else 1)
    return (order if info.shape[0] == len(order) else None), None, 0  # a wrong shape is reported later


def factors(header: Header, name: str) -> tuple[float, ...]:
    """A short tensor of float32. Raises ModelLoadError if it is something else."""
    info = header.tensors.get(name)
    if info is None or info.type is not Type.F32 or len(info.shape) != 1:
        raise ModelLoadError(f"{header.path.name} has no vector {name} of F32")
    values = header.bytes_of(info).view(np.float32)
    if not (np.isfinite(values) & (values > 0)).all():
        raise ModelLoadError(f"{header.path.name}: {name} has values that are not numbers over 0")
    return tuple(map(float, values))
