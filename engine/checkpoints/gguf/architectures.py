"""The architectures of GGUF files: what each has of its own, as fields of `config.json`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np

from personae.engine.checkpoints.gguf.metadata import Metadata
from personae.errors import as_json

LARGEST_HEAD = 2**14  # the most dimensions of a head, and the most heads
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
SOFTMAX, SIGMOID = 1, 2  # what makes the weights of experts of a router's scores
SCALES = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")  # Granite's

Translate = Callable[[Metadata, str, dict[str, Any]], None]
"""Adds an architecture's own fields to config.json's common ones. The name is the prefix of its metadata."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """name: in `config.json`. permuted: in q and k, the two rows that are rotated together are neighbours.
    reads: which of `UNSERVED` and `SCALES` `translate` reads. partial: a part of each head is rotated. tiled:
    the first value heads of all key heads come first. uneven: sizes may differ from layer to layer; the
    first layer's are the common ones. proportional: of layers without a window a share of the pairs is
    rotated, those whose factor in `rope_freqs` is 1. scaled: weights have the model's scales inside, which
    adapters would need apart. norm: the prefix of the norms' epsilon in the file.
    eps: its name in config.json."""

    name: str
    permuted: bool = False
    translate: Translate | None = None
    reads: tuple[str, ...] = ()
    partial: bool = False
    mixed: bool = False
    latent: bool = False
    tiled: bool = False
    uneven: bool = False
    proportional: bool = False
    scaled: bool = False
    norm: str = "layer_norm_rms"
    eps: str = "rms_norm_eps"


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


def _windows(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    """The window, and which layers have it: those of a list, all but each n-th, or what the family does."""
    window = metadata.integer(f"{prefix}.attention.sliding_window", default=0)
    values["sliding_window"] = window or None
    key = f"{prefix}.attention.sliding_window_pattern"
    if not window or key not in metadata:
        return
    layers = values["num_hidden_layers"]
    if isinstance(metadata.raw(key), int):
        every = metadata.integer(key)
        windowed = [every == 0 or (layer + 1) % every != 0 for layer in range(layers)]
    else:
        windowed = metadata.flags(key)
    if len(windowed) < layers:
        raise metadata.error(key, f"expected {layers} layers, found {len(windowed)}")
    kinds = ("full_attention", "sliding_attention")
    values["layer_types"] = [kinds[own] for own in windowed[:layers]]


def _cohere(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    values["logit_scale"] = metadata.number(f"{prefix}.logit_scale")


def _cohere2(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    _cohere(metadata, prefix, values)
    _windows(metadata, prefix, values)


def _starcoder2(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    window = metadata.integer(f"{prefix}.attention.sliding_window", default=0)
    values["sliding_window"] = window or None


def _stablelm(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    values["use_parallel_residual"] = metadata.flag(f"{prefix}.use_parallel_residual", default=False)


def _mistral3(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    """Ministral 3, whose q is scaled by its position."""
    rope = values.setdefault("rope_scaling", {"rope_type": "default"})
    beta = metadata.number(f"{prefix}.attention.temperature_scale", default=0.0)
    if beta:
        rope["llama_4_scaling_beta"] = beta
    original = values.pop("original_max_position_embeddings", None)
    if original:
        rope["original_max_position_embeddings"] = original
    values["rope_parameters"] = values.pop("rope_scaling") | {"rope_theta": values["rope_theta"]}


def _minimax_m2(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    _all_experts(metadata, prefix, values, renormalize=True, gating=SIGMOID)
    values["rotary_dim"] = int(values["head_dim"] * values.pop("partial_rotary_factor", 1.0))


def _ernie_moe(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    """ERNIE 4.5 with experts, in each `interleave_moe_layer_step`-th layer from the first sparse one on."""
    _experts(metadata, prefix, values, renormalize=True)
    values["moe_num_shared_experts"] = metadata.integer(f"{prefix}.expert_shared_count", default=0)
    metadata.raw(f"{prefix}.expert_shared_feed_forward_length")  # the tensors have it
    values["moe_layer_interval"] = metadata.integer(f"{prefix}.interleave_moe_layer_step", default=1)
    values["moe_layer_start_index"] = metadata.integer(f"{prefix}.leading_dense_block_count", default=0)
    values["moe_num_experts"] = values.pop("num_experts")
    values["moe_k"] = values.pop("num_experts_per_tok")
    del values["norm_topk_prob"]


def _dots1(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    _grouped_experts(metadata, prefix, values, renormalize=False, gating=SIGMOID)
    values["sliding_window"] = None


def _exaone_moe(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    _without_further(metadata, prefix, values)
    _windows(metadata, prefix, values)
    _grouped_experts(metadata, prefix, values, renormalize=True, gating=SIGMOID)
    values["num_shared_experts"] = values.pop("n_shared_experts")
    metadata.raw(f"{prefix}.expert_shared_feed_forward_length")  # the tensors have it


def _hunyuan_moe(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    _experts(metadata, prefix, values, renormalize=True)
    if values["moe_intermediate_size"] != values["intermediate_size"]:
        raise metadata.error(
            f"{prefix}.expert_feed_forward_length", "an MLP of another size than the experts is not supported"
        )
    if metadata.integer(f"{prefix}.expert_shared_count", default=1) != 1:
        raise metadata.error(f"{prefix}.expert_shared_count", "only 1 is supported")
    metadata.raw(f"{prefix}.expert_shared_feed_forward_length")  # the tensors have it
    for name in ("moe_intermediate_size", "norm_topk_prob"):
        del values[name]


def _gemma4(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    """The common head size is that of layers without a window."""
    _windows(metadata, prefix, values)
    layers, narrow = values["num_hidden_layers"], metadata.integer(f"{prefix}.attention.key_length_swa")
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if metadata.integer(f"{prefix}.{name}", default=narrow) != narrow:
            raise metadata.error(f"{prefix}.{name}", "differs from attention.key_length_swa: not supported")
    values |= {
        "global_head_dim": values["head_dim"],
        "head_dim": narrow,
        "num_kv_shared_layers": metadata.integer(f"{prefix}.attention.shared_kv_layers", default=0),
        "hidden_size_per_layer_input": metadata.integer(
            f"{prefix}.embedding_length_per_layer_input", default=0
        ),
        "vocab_size_per_layer_input": values["vocab_size"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": values.pop("rope_theta"),
                "partial_rotary_factor": values.pop("rotated_share"),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": metadata.number(f"{prefix}.rope.freq_base_swa", default=10000.0),
            },
        },
    }
    cap = "final_logit_softcapping"
    if f"{prefix}.{cap}" in metadata:
        values[cap] = metadata.number(f"{prefix}.{cap}")
    size, own = values["intermediate_size"], layers - values["num_kv_shared_layers"]
    sizes = metadata.per_layer(f"{prefix}.feed_forward_length", layers)
    values["use_double_wide_mlp"] = sizes != [size] * layers
    if values["use_double_wide_mlp"] and sizes != [size] * own + [2 * size] * (layers - own):
        raise metadata.error(f"{prefix}.feed_forward_length", "sizes that differ otherwise are not supported")
    heads = metadata.per_layer(f"{prefix}.attention.head_count_kv", layers)
    if {*heads} != {heads[0]}:
        kinds = [*zip(values.get("layer_types", []), heads, strict=False)]
        local, full = (
            {own for kind, own in kinds if kind == name} for name in ("sliding_attention", "full_attention")
        )
        if len(local) != 1 or len(full) != 1:
            raise metadata.error(
                f"{prefix}.attention.head_count_kv", "must be one number for each kind of layer"
            )
        values["num_key_value_heads"], values["num_global_key_value_heads"] = local.pop(), full.pop()
        values["attention_k_eq_v"] = True
    if metadata.integer(f"{prefix}.expert_used_count", default=0):
        _experts(metadata, prefix, values, renormalize=True)
        values |= {"enable_moe_block": True, "top_k_experts": values.pop("num_experts_per_tok")}
        del values["norm_topk_prob"]
    else:
        for name in ("expert_count", "expert_feed_forward_length"):
            metadata.raw(f"{prefix}.{name}")  # some converters write them for models without experts


def _gemma3n(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    _windows(metadata, prefix, values)
    layers, key = values["num_hidden_layers"], f"{prefix}.activation_sparsity_scale"
    cuts = metadata.raw(key)  # how many deviations above the mean a value must be; -inf for all
    if not isinstance(cuts, np.ndarray) or cuts.shape != (layers,) or np.isnan(cuts).any():
        raise metadata.error(key, f"expected {layers} numbers")
    values |= {
        "intermediate_size": metadata.per_layer(f"{prefix}.feed_forward_length", layers),
        "activation_sparsity_pattern": [round(NormalDist().cdf(float(cut)), 6) for cut in cuts],
        "num_kv_shared_layers": metadata.integer(f"{prefix}.attention.shared_kv_layers", default=0),
        "altup_num_inputs": metadata.integer(f"{prefix}.altup.num_inputs", default=4),
        "altup_active_idx": metadata.integer(f"{prefix}.altup.active_idx", default=0),
        "hidden_size_per_layer_input": metadata.integer(f"{prefix}.embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": values["vocab_size"],
        "rope_local_base_freq": metadata.number(f"{prefix}.rope.freq_base_swa", default=10000.0),
        "final_logit_softcapping": metadata.number(f"{prefix}.final_logit_softcapping", default=30.0),
    }


def _llama4(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    """Llama 4. What is not in the file is as in its makers' models: chunks of 8,192 tokens, in three of four
    layers, and norms of q and k but for the model of 128 experts."""
    values["intermediate_size_mlp"] = values["intermediate_size"]
    _experts(metadata, prefix, values, renormalize=False, gating=SIGMOID)
    values["intermediate_size"] = values.pop("moe_intermediate_size")
    del values["norm_topk_prob"]
    values["interleave_moe_layer_step"] = metadata.integer(f"{prefix}.interleave_moe_layer_step", default=1)
    window = f"{prefix}.attention.sliding_window"
    if window in metadata and not metadata.integer(window):
        values["attention_chunk_size"] = None
        values["no_rope_layers"] = [1] * values["num_hidden_layers"]
    values["use_qk_norm"] = values["num_experts"] != 128


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


def _all_experts(
    metadata: Metadata, prefix: str, values: dict[str, Any], *, renormalize: bool, gating: int = SOFTMAX
) -> None:
    """Families in which every layer has experts, so that their size is config.json's only one."""
    _experts(metadata, prefix, values, renormalize=renormalize, gating=gating)
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
    """GLM-4.5, and without any size of a dense MLP Solar Open."""
    _without_further(metadata, prefix, values)
    _grouped_experts(metadata, prefix, values, renormalize=True, gating=SIGMOID)
    if not values["intermediate_size"]:
        values["architecture"] = "SolarOpenForCausalLM"


def _mellum(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    """Mellum 2, whose layers with a window have a rotary embedding of their own, without YaRN."""
    _windows(metadata, prefix, values)
    _experts(metadata, prefix, values, renormalize=True)
    far = {"rope_type": "default", "rope_theta": values["rope_theta"], **values.pop("rope_scaling", {})}
    base = metadata.number(f"{prefix}.rope.freq_base_swa", default=values["rope_theta"])
    near = {"rope_type": "default", "rope_theta": base}
    values["rope_parameters"] = {"full_attention": far, "sliding_attention": near}


def _hy_v3(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    _without_further(metadata, prefix, values)
    _experts(metadata, prefix, values, renormalize=True, gating=SIGMOID)
    size, key = values["moe_intermediate_size"], f"{prefix}.expert_shared_feed_forward_length"
    shared = metadata.integer(key, default=size)
    if not size or not shared or shared % size:
        raise metadata.error(key, f"{shared} is not a multiple of the {size} of an expert")
    dense = metadata.integer(f"{prefix}.leading_dense_block_count", default=1)
    layers = values["num_hidden_layers"]
    values |= {
        "num_shared_experts": shared // size,
        "router_scaling_factor": metadata.number(f"{prefix}.expert_weights_scale", default=1.0),
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(layers)],
    }


def _granite_swa(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    """Granite with windows, which has a rotary embedding in all layers or in those of a list."""
    _granite(metadata, prefix, values)
    _windows(metadata, prefix, values)
    key, layers = f"{prefix}.attention.rope_pattern", values["num_hidden_layers"]
    if key in metadata:
        turned = metadata.flags(key)
        if len(turned) != layers:
            raise metadata.error(key, f"expected {layers} layers, found {len(turned)}")
        values["layer_rope_theta"] = [values["rope_theta"] if own else 0 for own in turned]
    shared = metadata.integer(f"{prefix}.expert_shared_feed_forward_length", default=0)
    if metadata.integer(f"{prefix}.expert_count", default=0):
        _all_experts(metadata, prefix, values, renormalize=True)
        values |= {"architecture": "GraniteMoeSWAForCausalLM", "shared_intermediate_size": shared}


def _minicpm3(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    """MiniCPM3. Its scales are not in the file: the family's own are its makers'."""
    for name in ("q_lora_rank", "kv_lora_rank"):
        values[name] = metadata.integer(f"{prefix}.attention.{name}")
    _divide_keys(metadata, prefix, values, metadata.integer(f"{prefix}.attention.key_length"))


def _divide_keys(metadata: Metadata, prefix: str, values: dict[str, Any], wide: int) -> None:
    """Adds the two parts of a latent attention's key of this size: the one that is rotated and the other."""
    key = f"{prefix}.rope.dimension_count"
    turned = metadata.integer(key)
    if not 0 < turned < wide <= LARGEST_HEAD:
        raise metadata.error(key, f"{turned} of {wide} is no plausible part")
    values |= {"qk_rope_head_dim": turned, "qk_nope_head_dim": wide - turned}


def _falcon_h1(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    """Falcon-H1, whose scales are in the file's weights. The norm of states comes after their gate."""
    _mamba(metadata, prefix, values)
    values["mamba_d_ssm"] = values["mamba_n_heads"] * values["mamba_d_head"]
    values["mamba_norm_before_gate"] = False


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
    """DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash: with experts chosen by sigmoid it is V3, and without any
    Youtu."""
    gating = metadata.integer(f"{prefix}.expert_gating_func", default=SOFTMAX)
    if not metadata.integer(f"{prefix}.expert_count", default=0):
        values["architecture"] = "YoutuForCausalLM"
        for name in ("feed_forward_length", "shared_count", "weights_scale", "weights_norm"):
            metadata.raw(f"{prefix}.expert_{name}")  # written all the same
        metadata.raw(f"{prefix}.leading_dense_block_count")
    else:
        _grouped_experts(metadata, prefix, values, renormalize=False, gating=gating or SOFTMAX)
    if gating == SIGMOID:
        values["architecture"] = "DeepseekV3ForCausalLM"
    elif values.get("n_group", 1) > 1:
        values["topk_method"] = "group_limited_greedy"
    # Newer files describe keys as the cache has them, and those of a head by further names.
    wide, value = (
        metadata.integer(f"{prefix}.attention.{name}_length_mla", default=length)
        for name, length in (
            ("key", metadata.integer(f"{prefix}.attention.key_length")),
            ("value", metadata.integer(f"{prefix}.attention.value_length")),
        )
    )
    if not 0 < value <= LARGEST_HEAD:
        raise metadata.error(f"{prefix}.attention.value_length", f"{value} is no plausible size")
    queries = metadata.integer(f"{prefix}.attention.q_lora_rank", default=0)
    values |= {
        "num_key_value_heads": values["num_attention_heads"],
        "q_lora_rank": queries or None,
        "kv_lora_rank": metadata.integer(f"{prefix}.attention.kv_lora_rank"),
        "v_head_dim": value,
    }
    _divide_keys(metadata, prefix, values, wide)
    rope = values.get("rope_scaling", {})
    if "mscale_all_dim" in rope:  # of this architecture the file has a tenth
        rope["mscale_all_dim"] *= 10
        rope["mscale"] = rope["mscale_all_dim"]


def _mistral4(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    """Mistral Small 4, whose q is scaled by its position. Its makers' scale need not be in the file."""
    _deepseek2(metadata, prefix, values)
    rope = values.pop("rope_scaling", {"rope_type": "default"})
    beta = metadata.number(f"{prefix}.attention.temperature_scale", default=0.1)
    original = values.pop("original_max_position_embeddings", 8192)
    scaled = {"llama_4_scaling_beta": beta, "original_max_position_embeddings": original}
    values["rope_parameters"] = rope | {"rope_theta": values["rope_theta"]} | scaled


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
    """Granite 4's H models, whose attention is rotated only where a field says so; without Granite's scales
    Bamba."""
    turned = metadata.flag(f"{prefix}.rope.scaling.finetuned", default=False)
    if turned and f"{prefix}.logit_scale" not in metadata:
        _bamba(metadata, prefix, values)
        return
    _granite(metadata, prefix, values)
    values["num_local_experts"] = metadata.integer(f"{prefix}.expert_count", default=0)
    shared = metadata.integer(f"{prefix}.expert_shared_feed_forward_length", default=0)
    if values["num_local_experts"]:
        _all_experts(metadata, prefix, values, renormalize=True)
    values["shared_intermediate_size"] = (
        shared if values["num_local_experts"] else values["intermediate_size"]
    )
    values["layer_types"] = _kinds_by_heads(metadata, prefix, values, "linear_attention")
    values["position_embedding_type"] = "rope" if turned else "nope"
    _mamba(metadata, prefix, values)


def _bamba(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    kinds = _kinds_by_heads(metadata, prefix, values, "linear_attention")
    values["architecture"] = "BambaForCausalLM"
    values["attn_layer_indices"] = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    values.setdefault("partial_rotary_factor", 1.0)
    _mamba(metadata, prefix, values)


def _mamba(metadata: Metadata, prefix: str, values: dict[str, Any]) -> None:
    """Adds the sizes of Mamba-2."""
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
LAYER_NORM = "layer_norm"
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
    "granite": Architecture(
        "GraniteForCausalLM", permuted=True, translate=_granite, reads=(*SCALES, *STATES)
    ),
    "granitemoe": Architecture(
        "GraniteMoeForCausalLM", permuted=True, translate=_granitemoe, reads=(*SCALES, *EXPERTS, *STATES)
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
        partial=True,
        mixed=True,
    ),
    "granite_swa": Architecture(
        "GraniteSWAForCausalLM", permuted=True, translate=_granite_swa, reads=(*SCALES, *EXPERTS)
    ),
    "falcon-h1": Architecture("FalconH1ForCausalLM", translate=_falcon_h1, reads=STATES, scaled=True),
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
    "mistral4": Architecture("Mistral4ForCausalLM", translate=_mistral4, reads=EXPERTS, latent=True),
    "minicpm3": Architecture("MiniCPM3ForCausalLM", translate=_minicpm3, latent=True),
    "mellum": Architecture("MellumForCausalLM", translate=_mellum, reads=EXPERTS),
    "gemma4": Architecture(
        "Gemma4ForCausalLM",
        translate=_gemma4,
        reads=(*EXPERTS, "final_logit_softcapping"),
        uneven=True,
        proportional=True,
    ),
    "gemma3n": Architecture(
        "Gemma3nForCausalLM", translate=_gemma3n, reads=("final_logit_softcapping",), uneven=True
    ),
    "llama4": Architecture("Llama4ForCausalLM", translate=_llama4, reads=EXPERTS),
    "arcee": Architecture("ArceeForCausalLM", permuted=True),
    "chatglm": Architecture("GlmForCausalLM", partial=True),
    "glm4": Architecture("Glm4ForCausalLM", partial=True),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM"),
    "ernie4_5-moe": Architecture("Ernie4_5_MoeForCausalLM", translate=_ernie_moe, reads=EXPERTS),
    "exaone4": Architecture("Exaone4ForCausalLM", translate=_windows),
    "exaone-moe": Architecture("ExaoneMoeForCausalLM", translate=_exaone_moe, reads=EXPERTS),
    "dots1": Architecture("Dots1ForCausalLM", translate=_dots1, reads=EXPERTS),
    "minimax-m2": Architecture("MiniMaxM2ForCausalLM", translate=_minimax_m2, reads=EXPERTS, partial=True),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM"),
    "hy_v3": Architecture("HYV3ForCausalLM", translate=_hy_v3, reads=EXPERTS),
    "hunyuan-moe": Architecture("HunYuanMoEV1ForCausalLM", translate=_hunyuan_moe, reads=EXPERTS),
    "mistral3": Architecture("Ministral3ForCausalLM", permuted=True, translate=_mistral3),
    "command-r": Architecture(
        "CohereForCausalLM", translate=_cohere, reads=("logit_scale",), norm=LAYER_NORM, eps="layer_norm_eps"
    ),
    "cohere2": Architecture(
        "Cohere2ForCausalLM",
        translate=_cohere2,
        reads=("logit_scale",),
        norm=LAYER_NORM,
        eps="layer_norm_eps",
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM", translate=_starcoder2, norm=LAYER_NORM, eps="norm_epsilon"
    ),
    "phi2": Architecture("PhiForCausalLM", partial=True, norm=LAYER_NORM, eps="layer_norm_eps"),
    "stablelm": Architecture(
        "StableLmForCausalLM",
        translate=_stablelm,
        reads=("use_parallel_residual",),
        partial=True,
        norm=LAYER_NORM,
        eps="layer_norm_eps",
    ),
    "jais2": Architecture("Jais2ForCausalLM", norm=LAYER_NORM, eps="layer_norm_eps"),
    "nemotron": Architecture("NemotronForCausalLM", partial=True, norm=LAYER_NORM, eps="norm_eps"),
    "lfm2": Architecture("Lfm2ForCausalLM", translate=_lfm2, mixed=True),
    "lfm2moe": Architecture("Lfm2MoeForCausalLM", translate=_lfm2moe, reads=EXPERTS, mixed=True),
}


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
        raise metadata.error(
            "general.type", f"this is {what.get(kind, f'not a model but of type {as_json(kind)}')}"
        )
    name = metadata.text("general.architecture")
    if name not in ARCHITECTURES:
        raise metadata.error(
            "general.architecture",
            f"{as_json(name)} is not supported; supported are: {', '.join(ARCHITECTURES)}",
        )
    return ARCHITECTURES[name]
