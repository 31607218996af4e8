"""Translates GGUF's metadata into the fields of `config.json`, which the model families read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gguf import PoolingType

from personae.engine.checkpoints.gguf.header import TensorInfo
from personae.engine.checkpoints.gguf.metadata import Metadata
from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.attention import AttentionSpec
from personae.engine.layers.block import LayerSpec, NoBlockSpec
from personae.engine.layers.delta_net import DeltaNetSpec
from personae.engine.layers.latent_attention import LatentAttentionSpec
from personae.engine.layers.mamba import MambaSpec
from personae.engine.layers.mlp import MlpSpec
from personae.engine.layers.rotary import RopeConfig
from personae.engine.layers.short_convolution import ShortConvolutionSpec
from personae.engine.models import family
from personae.errors import ModelLoadError

LONGEST = 2**24  # the longest context, in tokens, that is accepted
LARGEST_HEAD = 2**14  # the most dimensions of a head, and the most heads
# Fields that change the arithmetic, and that no supported architecture needs.
UNSERVED = (
    "expert_count",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.relative_buckets_count",
    "use_parallel_residual",
    "ssm.state_size",
)
# Fields that llama.cpp's converter writes, and that change nothing in these architectures.
MEANINGLESS = frozenset(
    [
        "attention.layer_norm_epsilon",  # the norms are RMS norms
        "expert_used_count",  # there are no experts
        "rope.scaling.finetuned",
        "tensor_data_layout",
        "vocab_size",  # the embedding has the rows
    ]
)
YARN = {  # below `rope.scaling`, by config.json's names
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_log_multiplier": "mscale_all_dim",
}
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
SOFTMAX, SIGMOID = 1, 2  # what makes the weights of experts of a router's scores
SCALES = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")  # Granite's

Translate = Callable[[Metadata, str, dict[str, Any]], None]
"""Adds an architecture's own fields to config.json's common ones. The name is the prefix of its metadata."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """name: in `config.json`. permuted: in q and k, the two rows that are rotated together are neighbours.
    reads: which of `UNSERVED` and `SCALES` `translate` reads. partial: a part of each head is rotated. tiled:
    the first value heads of all key heads come first. eps: config.json's name for the norms' epsilon."""

    name: str
    permuted: bool = False
    translate: Translate | None = None
    reads: tuple[str, ...] = ()
    partial: bool = False
    mixed: bool = False
    latent: bool = False
    tiled: bool = False
    eps: str = "rms_norm_eps"


def read_gguf_config(
    metadata: Metadata,
    tensors: Mapping[str, TensorInfo],
    factors: Callable[[str], tuple[float, ...]],
) -> ModelConfig:
    """The shape of a file's model. `factors` reads one of the tensors that scale the rotary embedding.

    Raises ModelLoadError, which names the field.
    """
    architecture = architecture_of(metadata)
    prefix = metadata.text("general.architecture")
    values = _common(metadata, prefix, architecture, tensors)
    if "rope_factors_long.weight" in tensors:
        values["rope_scaling"] = {
            **values.pop("rope_scaling", {}),
            "rope_type": "longrope",
            "long_factor": list(factors("rope_factors_long.weight")),
            "short_factor": list(factors("rope_factors_short.weight")),
        }
    elif metadata.text(f"{prefix}.rope.scaling.type", default="none") == "longrope":
        raise ModelLoadError(f"{metadata.where} has no rope_factors_long.weight, which longrope needs")
    name = architecture.name
    if architecture.translate is not None:
        architecture.translate(metadata, prefix, values)
        name = values.pop("architecture", name)
    translate = family(name)
    assert translate is not None
    config = replace(
        translate(name, Fields(values, metadata.where)),
        norm_offset=0.0,  # GGUF adds the offset to the stored norms
    ).with_layers(partial(_with_biases, tensors))
    if "rope_freqs.weight" in tensors:
        config = _with_factors(metadata, config, factors("rope_freqs.weight"))
    metadata.refuse_unread(f"{prefix}.", MEANINGLESS)
    return config


def _with_biases(tensors: Mapping[str, TensorInfo], layer: LayerSpec) -> LayerSpec:
    """The layer with the biases that the file has. Experts have them or not by their family."""
    if isinstance(layer.attention, LatentAttentionSpec):
        bias = _any(tensors, "attn_kv_a_mqa.bias")
        return replace(layer, attention=replace(layer.attention, bias=bias))
    if isinstance(layer.attention, DeltaNetSpec):
        return layer
    if isinstance(layer.attention, MambaSpec):
        bias = any(name.endswith(".ssm_conv1d.bias") for name in tensors)
        return replace(layer, attention=replace(layer.attention, conv_bias=bias))
    if isinstance(layer.attention, NoBlockSpec):
        return layer
    if isinstance(layer.attention, ShortConvolutionSpec):
        bias = any(name.endswith(".shortconv.conv.bias") for name in tensors)
        return replace(layer, attention=replace(layer.attention, bias=bias))
    attention = replace(
        _attention(layer),
        qkv_bias=_any(tensors, "attn_q.bias", "attn_qkv.bias"),
        o_bias=_any(tensors, "attn_output.bias"),
    )
    if not isinstance(layer.mlp, MlpSpec):
        return LayerSpec(attention, layer.mlp)
    return LayerSpec(attention, replace(layer.mlp, bias=_any(tensors, "ffn_up.bias")))


def _attention(layer: LayerSpec) -> AttentionSpec:
    """The layer's attention. Other blocks in its place are not supported in GGUF."""
    assert isinstance(layer.attention, AttentionSpec)
    return layer.attention


def _any(tensors: Mapping[str, TensorInfo], *names: str) -> bool:
    """Whether the first layer has one of these."""
    return any(f"blk.0.{name}" in tensors for name in names)


def architecture_of(metadata: Metadata) -> Architecture:
    """The architecture of a file. Raises ModelLoadError if it is not supported, or if the file is not a
    model."""
    kind = metadata.text("general.type", default="model")
    if kind != "model":
        what = {
            "adapter": "a LoRA adapter; adapters are supported in PEFT's format",
            "imatrix": "an importance matrix (imatrix), which says how to quantize a model; name the model",
            "mmproj": "the part of a model that reads images; name the file with the language model",
        }
        raise metadata.error("general.type", f"this is {what.get(kind, f'not a model but of type {kind!r}')}")
    name = metadata.text("general.architecture")
    if name not in ARCHITECTURES:
        raise metadata.error(
            "general.architecture", f"{name!r} is not supported; supported are: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def _common(
    metadata: Metadata, prefix: str, architecture: Architecture, tensors: Mapping[str, TensorInfo]
) -> dict[str, Any]:
    for field in UNSERVED:
        key = f"{prefix}.{field}"
        if field not in architecture.reads and metadata.raw(key) not in (None, 0, False):
            raise metadata.error(key, "is not supported")
    for field in SCALES:
        if field not in architecture.reads and f"{prefix}.{field}" in metadata:
            raise metadata.error(f"{prefix}.{field}", "is supported in Granite only")
    if not metadata.flag(f"{prefix}.attention.causal", default=True):
        raise metadata.error(f"{prefix}.attention.causal", "attention in both directions is not supported")
    _check_pooling(metadata, f"{prefix}.pooling_type")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{metadata.where} has no matrix token_embd.weight")
    layers = metadata.integer(f"{prefix}.block_count")
    if layers > len(tensors):
        raise metadata.error(f"{prefix}.block_count", f"{layers} layers cannot have {len(tensors)} tensors")
    longest = metadata.integer(f"{prefix}.context_length")
    if longest > LONGEST:
        raise metadata.error(f"{prefix}.context_length", f"{longest} is over {LONGEST}")
    heads, hidden = (
        metadata.integer(f"{prefix}.attention.head_count"),
        metadata.integer(f"{prefix}.embedding_length"),
    )
    if hidden != embedding.shape[1]:
        raise metadata.error(
            f"{prefix}.embedding_length", f"is {hidden}, but token_embd.weight has {embedding.shape[1]}"
        )
    values: dict[str, Any] = {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": _inner_size(metadata, f"{prefix}.feed_forward_length", architecture),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(metadata, prefix, architecture, heads),
        "max_position_embeddings": longest,
        architecture.eps: metadata.number(f"{prefix}.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number(f"{prefix}.rope.freq_base", default=10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
    }
    head = 0 if architecture.latent else _head_size(metadata, prefix, values, partial=architecture.partial)
    _rope(metadata, prefix, values, head)
    return values


def _inner_size(metadata: Metadata, key: str, architecture: Architecture) -> int:
    """The size of an MLP's inner vectors. Layers of a mixed architecture may have none: 0."""
    if architecture.mixed and not isinstance(metadata.raw(key), int):
        sizes = {*metadata.integers(key, default=[])} - {0}
        if len(sizes) != 1:
            raise metadata.error(key, "must be one number, or 0, for every layer")
        return sizes.pop()
    return metadata.integer(key, default=0 if "expert_count" in architecture.reads else None)


def _kv_heads(metadata: Metadata, prefix: str, architecture: Architecture, heads: int) -> int:
    """The heads of keys and values, of all layers that have some."""
    key = f"{prefix}.attention.head_count_kv"
    if not architecture.mixed:
        return metadata.integer(key, default=heads)
    found = {*metadata.integers(key, default=[heads])} - {0}
    if len(found) != 1:
        raise metadata.error(key, "must be one number, or 0, for every layer")
    return found.pop()


def _check_pooling(metadata: Metadata, key: str) -> None:
    """Raises ModelLoadError unless vectors are the mean of the hidden states or the last one, which requests
    choose."""
    kind = metadata.integer(key, default=0)
    if kind not in (PoolingType.NONE, PoolingType.MEAN, PoolingType.LAST):
        raise metadata.error(key, f"{kind} is not supported, only mean (1) and last (3)")


def _head_size(metadata: Metadata, prefix: str, values: dict[str, Any], *, partial: bool) -> int:
    """The size of a head. Adds it, and its rotated part, to `values`."""
    heads = values["num_attention_heads"]
    if not heads:
        raise metadata.error(f"{prefix}.attention.head_count", "must be at least 1")
    key, value = f"{prefix}.attention.key_length", f"{prefix}.attention.value_length"
    head = metadata.integer(key, default=values["hidden_size"] // heads)
    if not 0 < head <= LARGEST_HEAD or heads > LARGEST_HEAD:
        raise metadata.error(key, f"{heads} heads of {head} dimensions are not plausible sizes")
    if metadata.integer(value, default=head) != head:
        raise metadata.error(value, f"differs from {key}, which is not supported")
    values["head_dim"] = head
    turned = metadata.integer(f"{prefix}.rope.dimension_count", default=head)
    if turned != head:
        if not partial:
            raise metadata.error(f"{prefix}.rope.dimension_count", f"{turned} of {head} is not supported")
        values["partial_rotary_factor"] = turned / head
    return head


def _rope(metadata: Metadata, prefix: str, values: dict[str, Any], head: int) -> None:
    """Adds the scaling of the rotary embedding to `values`."""
    scaling = f"{prefix}.rope.scaling"
    old, new = f"{prefix}.rope.scale_linear", f"{scaling}.factor"
    factor = new if new in metadata else old
    stretches = metadata.raw(factor) not in (None, 0, 1)
    # llama.cpp's own default.
    kind = metadata.text(f"{scaling}.type", default="linear" if stretches else "none")
    original = metadata.integer(f"{scaling}.original_context_length", default=0)
    # The first is today's name for config.json's attention_factor.
    magnitudes = [f"{scaling}.{name}" for name in ("yarn_attn_factor", "attn_factor")]
    magnitude = next((metadata.number(key) for key in magnitudes if key in metadata), None)
    yarn = {
        name: metadata.number(f"{scaling}.{key}")
        for key, name in YARN.items()
        if f"{scaling}.{key}" in metadata
    }
    if metadata.raw(f"{scaling}.yarn_ext_factor") not in (None, -1.0, 1.0):
        raise metadata.error(f"{scaling}.yarn_ext_factor", "is not supported, only 1")
    if kind == "linear" and stretches:
        values["rope_scaling"] = {"rope_type": "linear", "factor": metadata.number(factor)}
    elif kind == "yarn":
        values["rope_scaling"] = {"rope_type": "yarn", "factor": metadata.number(factor), **yarn}
        if "mscale_all_dim" in yarn:
            values["rope_scaling"]["mscale"] = 1.0
    elif kind not in ("none", "linear", "longrope"):
        raise metadata.error(
            f"{scaling}.type", f"{kind!r} is not supported, only none, linear, yarn and longrope"
        )
    if kind in ("yarn", "longrope") or prefix == "phi3":
        if original:
            values["original_max_position_embeddings"] = original
        if magnitude is not None:
            values.setdefault("rope_scaling", {})["attention_factor"] = magnitude
    elif magnitude not in (None, 1.0):
        raise metadata.error(magnitudes[1], f"is supported with yarn and longrope only, not with {kind}")


def _with_factors(metadata: Metadata, config: ModelConfig, factors: tuple[float, ...]) -> ModelConfig:
    """Llama 3's rope scaling: each pair's frequency is divided by its own factor."""
    pairs = _attention(config.layer_specs[0]).head_dim // 2
    if len(factors) != pairs:
        raise ModelLoadError(
            f"{metadata.where}: rope_freqs.weight has {len(factors)} factors for {pairs} pairs"
        )

    def stretched(rope: RopeConfig | None) -> RopeConfig | None:
        if rope is None:
            return None
        if rope.type != "default":
            raise ModelLoadError(
                f"{metadata.where}: rope_freqs.weight and rope.scaling are not supported together"
            )
        return replace(
            rope,
            type="longrope",
            original_max_position=config.max_position,
            attention_factor=1.0,
            short_factors=factors,
            long_factors=factors,
        )

    def layer(spec: LayerSpec) -> LayerSpec:
        attention = _attention(spec)
        return LayerSpec(replace(attention, rope=stretched(attention.rope)), spec.mlp)

    return config.with_layers(layer)


def _gemma3(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    values["sliding_window"] = metadata.integer(f"{prefix}.attention.sliding_window")
    values["sliding_window_pattern"] = metadata.integer(
        f"{prefix}.attention.sliding_window_pattern", default=6
    )
    values["rope_theta"] = _first(
        metadata, f"{prefix}.rope", "freq_base", "global.freq_base", default=1000000.0
    )
    values["rope_local_base_freq"] = _first(
        metadata, f"{prefix}.rope", "freq_base_swa", "local.freq_base", default=10000.0
    )
    heads, largest = values["num_attention_heads"], values["num_hidden_layers"] == 62
    # Not in the file: the 27B model scales scores by its hidden size, the others by the size of a head.
    values["query_pre_attn_scalar"] = float(values["hidden_size"] // heads if largest else values["head_dim"])


def _first(metadata: Metadata, prefix: str, *names: str, default: float) -> float:
    """The first of these numbers that the file has: llama.cpp's name, then that of Ollama's converter."""
    keys = (f"{prefix}.{name}" for name in names)
    return next((metadata.number(key) for key in keys if key in metadata), default)


def _granite(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    names = {
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "attention.scale": "attention_multiplier",
        "logit_scale": "logits_scaling",
    }
    for key, name in names.items():
        if f"{prefix}.{key}" in metadata:
            values[name] = metadata.number(f"{prefix}.{key}")
    values.setdefault("attention_multiplier", values["head_dim"] ** -0.5)


def _olmo(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    window = metadata.integer(f"{prefix}.attention.sliding_window", default=0)
    if window:
        values |= {"architecture": "Olmo3ForCausalLM", "sliding_window": window}


def _phi3(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    window = metadata.integer(f"{prefix}.attention.sliding_window", default=0)
    values["sliding_window"] = window or None
    rope = values.get("rope_scaling")
    if rope is not None and "rope_type" not in rope:
        del values["rope_scaling"]  # an attention factor without scaling has no effect


def _gemma2(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    for name in CAPS:
        values[name] = metadata.number(f"{prefix}.{name}")
    values["sliding_window"] = metadata.integer(f"{prefix}.attention.sliding_window", default=4096)
    heads, largest = values["num_attention_heads"], values["num_hidden_layers"] == 46
    # Not in the file, as in Gemma 3.
    values["query_pre_attn_scalar"] = float(values["hidden_size"] // heads if largest else values["head_dim"])


def _experts(
    metadata: Metadata, prefix: str, values: dict[str, Any], *, renormalize: bool, gating: int = SOFTMAX
) -> None:
    """Adds what the file says of experts. `renormalize`: whether the weights of a token's experts add up to
    1, where the file does not say it."""
    key = f"{prefix}.expert_gating_func"
    if metadata.integer(key, default=gating) != gating:
        raise metadata.error(key, f"only {gating} is supported")
    values["num_experts"] = metadata.integer(f"{prefix}.expert_count")
    values["num_experts_per_tok"] = metadata.integer(f"{prefix}.expert_used_count")
    values["norm_topk_prob"] = metadata.flag(f"{prefix}.expert_weights_norm", default=renormalize)
    size = metadata.integer(f"{prefix}.expert_feed_forward_length", default=values["intermediate_size"])
    values["moe_intermediate_size"] = size
    grouped = f"{prefix}.expert_shared_count" in metadata
    if (
        metadata.number(f"{prefix}.expert_weights_scale", default=1.0) != 1.0
        and not grouped
        and gating == SOFTMAX
    ):
        raise metadata.error(f"{prefix}.expert_weights_scale", "only 1 is supported")


def _llama(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    """Mixtral is a llama with experts."""
    if metadata.integer(f"{prefix}.expert_count", default=0):
        values["architecture"] = "MixtralForCausalLM"
        _all_experts(metadata, prefix, values, renormalize=True)


def _all_experts(metadata: Metadata, prefix: str, values: dict[str, Any], *, renormalize: bool) -> None:
    """Families in which every layer has experts, so that their size is config.json's only one."""
    _experts(metadata, prefix, values, renormalize=renormalize)
    values["intermediate_size"] = values["moe_intermediate_size"]


def _granitemoe(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    _granite(metadata, prefix, values)
    _all_experts(metadata, prefix, values, renormalize=True)
    shared = metadata.integer(f"{prefix}.expert_shared_feed_forward_length", default=0)
    if shared:
        values |= {"architecture": "GraniteMoeSharedForCausalLM", "shared_intermediate_size": shared}


def _gpt_oss(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    _all_experts(metadata, prefix, values, renormalize=True)
    values["sliding_window"] = metadata.integer(f"{prefix}.attention.sliding_window")
    # Not in the file: its makers do not round the bounds of YaRN's ramp.
    values.setdefault("rope_scaling", {"rope_type": "default"})["truncate"] = False


def _qwen2moe(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    _experts(metadata, prefix, values, renormalize=False)
    values["shared_expert_intermediate_size"] = metadata.integer(
        f"{prefix}.expert_shared_feed_forward_length", default=values["intermediate_size"]
    )


def _glm4moe(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    _without_further(metadata, prefix, values)
    _grouped_experts(metadata, prefix, values, renormalize=True, gating=SIGMOID)


def _without_further(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    """Leaves out the layers that predict further tokens."""
    further = metadata.integer(f"{prefix}.nextn_predict_layers", default=0)
    if further >= values["num_hidden_layers"]:
        raise metadata.error(f"{prefix}.nextn_predict_layers", f"{further} are as many as there are layers")
    values["num_hidden_layers"] -= further
    values["num_nextn_predict_layers"] = further


def _grouped_experts(
    metadata: Metadata, prefix: str, values: dict[str, Any], *, renormalize: bool, gating: int
) -> None:
    """Experts in groups, with dense first layers and experts that every token uses."""
    _experts(metadata, prefix, values, renormalize=renormalize, gating=gating)
    values["first_k_dense_replace"] = metadata.integer(f"{prefix}.leading_dense_block_count", default=0)
    values["n_shared_experts"] = metadata.integer(f"{prefix}.expert_shared_count")
    values["routed_scaling_factor"] = metadata.number(f"{prefix}.expert_weights_scale", default=1.0)
    values["n_group"] = metadata.integer(f"{prefix}.expert_group_count", default=1)
    values["topk_group"] = metadata.integer(f"{prefix}.expert_group_used_count", default=1)


def _deepseek2(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    """DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash: with experts chosen by sigmoid it is V3."""
    gating = metadata.integer(f"{prefix}.expert_gating_func", default=SOFTMAX)
    _grouped_experts(metadata, prefix, values, renormalize=False, gating=gating or SOFTMAX)
    if gating == SIGMOID:
        values["architecture"] = "DeepseekV3ForCausalLM"
    elif values["n_group"] > 1:
        values["topk_method"] = "group_limited_greedy"
    # Newer files describe keys as the cache has them, and those of a head by further names.
    wide, value = (
        metadata.integer(f"{prefix}.attention.{name}_length_mla", default=length)
        for name, length in (
            ("key", metadata.integer(f"{prefix}.attention.key_length")),
            ("value", metadata.integer(f"{prefix}.attention.value_length")),
        )
    )
    turned = metadata.integer(f"{prefix}.rope.dimension_count")
    if not 0 < turned < wide <= LARGEST_HEAD or not 0 < value <= LARGEST_HEAD:
        raise metadata.error(f"{prefix}.rope.dimension_count", f"{turned} of {wide} is no plausible part")
    queries = metadata.integer(f"{prefix}.attention.q_lora_rank", default=0)
    values |= {
        "num_key_value_heads": values["num_attention_heads"],
        "q_lora_rank": queries or None,
        "kv_lora_rank": metadata.integer(f"{prefix}.attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": wide - turned,
        "v_head_dim": value,
    }
    rope = values.get("rope_scaling", {})
    if "mscale_all_dim" in rope:  # of this architecture the file has a tenth
        rope["mscale_all_dim"] *= 10
        rope["mscale"] = rope["mscale_all_dim"]


def _lfm2(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    values["layer_types"] = _kinds_by_heads(metadata, prefix, values, "conv")
    values["conv_L_cache"] = metadata.integer(f"{prefix}.shortconv.l_cache")
    values["norm_eps"] = values["rms_norm_eps"]
    values["block_auto_adjust_ff_dim"] = False  # the file has the size that comes of it


def _lfm2moe(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    _lfm2(metadata, prefix, values)
    _experts(metadata, prefix, values, renormalize=True, gating=SIGMOID)
    values["num_dense_layers"] = metadata.integer(f"{prefix}.leading_dense_block_count", default=0)
    values["routed_scaling_factor"] = metadata.number(f"{prefix}.expert_weights_scale", default=1.0)


def _qwen3next(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    """Qwen3.5 and Qwen3-Next. Which layers have attention follows from how often."""
    if f"{prefix}.expert_count" in metadata:
        values["intermediate_size"] = values["intermediate_size"] or 1  # every layer has experts
        _qwen2moe(metadata, prefix, values)
        values["norm_topk_prob"] = metadata.flag(f"{prefix}.expert_weights_norm", default=True)
    _without_further(metadata, prefix, values)
    values["mtp_num_hidden_layers"] = values["num_nextn_predict_layers"]
    heads, width = _state_heads(metadata, prefix)
    _check_sections(metadata, f"{prefix}.rope.dimension_sections", values)
    values |= {
        "full_attention_interval": metadata.integer(f"{prefix}.full_attention_interval", default=4),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": width,
        "linear_num_key_heads": metadata.integer(f"{prefix}.ssm.group_count"),
        "linear_key_head_dim": metadata.integer(f"{prefix}.ssm.state_size"),
        "linear_conv_kernel_dim": metadata.integer(f"{prefix}.ssm.conv_kernel"),
    }


def _granitehybrid(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    """Granite 4's H models, whose attention is rotated only where a field says so."""
    _granite(metadata, prefix, values)
    values["num_local_experts"] = metadata.integer(f"{prefix}.expert_count", default=0)
    shared = metadata.integer(f"{prefix}.expert_shared_feed_forward_length", default=0)
    if values["num_local_experts"]:
        _all_experts(metadata, prefix, values, renormalize=True)
    values["shared_intermediate_size"] = (
        shared if values["num_local_experts"] else values["intermediate_size"]
    )
    values["layer_types"] = _kinds_by_heads(metadata, prefix, values, "linear_attention")
    turned = metadata.flag(f"{prefix}.rope.scaling.finetuned", default=False)
    values["position_embedding_type"] = "rope" if turned else "nope"
    heads, width = _state_heads(metadata, prefix)
    values |= {
        "mamba_n_heads": heads,
        "mamba_d_head": width,
        "mamba_expand": heads * width // values["hidden_size"],
        "mamba_d_state": metadata.integer(f"{prefix}.ssm.state_size"),
        "mamba_n_groups": metadata.integer(f"{prefix}.ssm.group_count", default=1),
        "mamba_d_conv": metadata.integer(f"{prefix}.ssm.conv_kernel"),
    }


def _state_heads(metadata: Metadata, prefix: str) -> tuple[int, int]:
    """The heads of states, and the width of one."""
    heads, inner = (metadata.integer(f"{prefix}.ssm.{name}") for name in ("time_step_rank", "inner_size"))
    if not heads or inner % heads:
        raise metadata.error(f"{prefix}.ssm.inner_size", f"{inner} is not a multiple of {heads} heads")
    return heads, inner // heads


def _nemotron_h(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    """One block a layer: attention, an MLP or experts, or else Mamba-2."""
    key, layers = f"{prefix}.feed_forward_length", values["num_hidden_layers"]
    sizes = metadata.integers(key, default=[])
    if len(sizes) != layers:
        raise metadata.error(key, f"expected a number for each of {layers} layers, found {len(sizes)}")
    sparse = metadata.integer(f"{prefix}.expert_count", default=0)
    kinds = _kinds_by_heads(metadata, prefix, values, "mamba")
    values["layers_block_type"] = [
        ("moe" if sparse else "mlp") if size else kind for kind, size in zip(kinds, sizes, strict=True)
    ]
    heads, width = _state_heads(metadata, prefix)
    values |= {
        "mamba_num_heads": heads,
        "mamba_head_dim": width,
        "ssm_state_size": metadata.integer(f"{prefix}.ssm.state_size"),
        "n_groups": metadata.integer(f"{prefix}.ssm.group_count", default=1),
        "conv_kernel": metadata.integer(f"{prefix}.ssm.conv_kernel"),
    }
    metadata.raw(f"{prefix}.rope.scaling.finetuned")  # attention is not rotated
    if sparse:
        _grouped_experts(metadata, prefix, values, renormalize=True, gating=SIGMOID)
        values["moe_shared_expert_intermediate_size"] = metadata.integer(
            f"{prefix}.expert_shared_feed_forward_length"
        )
        values["moe_latent_size"] = metadata.integer(f"{prefix}.moe_latent_size", default=0) or None


def _kinds_by_heads(metadata: Metadata, prefix: str, values: dict[str, Any], other: str) -> list[str]:
    """The kind of each layer: attention if it has heads of keys and values."""
    key, layers = f"{prefix}.attention.head_count_kv", values["num_hidden_layers"]
    heads = metadata.integers(key, default=[])
    if len(heads) != layers:
        raise metadata.error(key, f"expected a number for each of {layers} layers, found {len(heads)}")
    return ["full_attention" if each else other for each in heads]


def _check_sections(metadata: Metadata, key: str, values: dict[str, Any]) -> None:
    """The first three parts of a text's position are the same. They must be those of all rotated pairs."""
    pairs = int(values["head_dim"] * values.get("partial_rotary_factor", 1.0)) // 2
    sections = metadata.integers(key, default=[pairs])
    if sum(sections[:3]) < pairs:
        raise metadata.error(key, f"{sections} are not all of {pairs} pairs")


EXPERTS = ("expert_count",)
STATES = ("ssm.state_size",)
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", permuted=True, translate=_llama, reads=EXPERTS),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", translate=_qwen2moe, reads=EXPERTS),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", translate=partial(_experts, renormalize=True), reads=EXPERTS
    ),
    "gemma": Architecture("GemmaForCausalLM"),
    "gemma2": Architecture("Gemma2ForCausalLM", translate=_gemma2, reads=CAPS),
    "gemma3": Architecture("Gemma3ForCausalLM", translate=_gemma3),
    "phi3": Architecture("Phi3ForCausalLM", translate=_phi3, partial=True),
    "granite": Architecture("GraniteForCausalLM", permuted=True, translate=_granite, reads=SCALES),
    "granitemoe": Architecture(
        "GraniteMoeForCausalLM", permuted=True, translate=_granitemoe, reads=(*SCALES, *EXPERTS)
    ),
    "qwen3next": Architecture(
        "Qwen3NextForCausalLM", translate=_qwen3next, reads=(*EXPERTS, *STATES), partial=True
    ),
    "qwen35": Architecture(
        "Qwen3_5ForCausalLM", translate=_qwen3next, reads=STATES, partial=True, tiled=True
    ),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM", translate=_qwen3next, reads=(*EXPERTS, *STATES), partial=True, tiled=True
    ),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM",
        permuted=True,
        translate=_granitehybrid,
        reads=(*SCALES, *EXPERTS, *STATES),
        mixed=True,
    ),
    "nemotron_h": Architecture(
        "NemotronHForCausalLM",
        permuted=True,
        translate=_nemotron_h,
        reads=STATES,
        mixed=True,
        eps="layer_norm_epsilon",
    ),
    "nemotron_h_moe": Architecture(
        "NemotronHForCausalLM",
        permuted=True,
        translate=_nemotron_h,
        reads=(*EXPERTS, *STATES),
        mixed=True,
        eps="layer_norm_epsilon",
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", permuted=True),
    "olmo2": Architecture("Olmo2ForCausalLM", translate=_olmo),
    "olmoe": Architecture(
        "OlmoeForCausalLM", translate=partial(_all_experts, renormalize=False), reads=EXPERTS
    ),
    "gpt-oss": Architecture("GptOssForCausalLM", translate=_gpt_oss, reads=EXPERTS),
    "glm4moe": Architecture("Glm4MoeForCausalLM", translate=_glm4moe, reads=EXPERTS, partial=True),
    "seed_oss": Architecture("SeedOssForCausalLM"),
    "deepseek2": Architecture("DeepseekV2ForCausalLM", translate=_deepseek2, reads=EXPERTS, latent=True),
    "lfm2": Architecture("Lfm2ForCausalLM", translate=_lfm2, mixed=True),
    "lfm2moe": Architecture("Lfm2MoeForCausalLM", translate=_lfm2moe, reads=EXPERTS, mixed=True),
}
