"""What the families' config files share: sizes, rope, windows, and the fields that no family supports."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.attention import AttentionSpec, QkNorm
from personae.engine.layers.block import BlockSpec, LayerSpec
from personae.engine.layers.latent_attention import LatentAttentionSpec
from personae.engine.layers.mlp import GATES, Activation, MlpSpec
from personae.engine.layers.moe import MoeSpec
from personae.engine.layers.rotary import RopeConfig
from personae.errors import as_json
from personae.kernels.moe import Routing

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "relu2",
}


SANDWICH = ("input_layernorm", "pre_feedforward_layernorm")
AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
"""The names of the norms before and after each half of a layer, in families that have both."""
MEANINGLESS_ROPE = ("finetuned", "original_max_position_embeddings")
"""Keys of a rotary embedding that change nothing where its type does not read them."""


def decoder_config(
    architecture: str,
    fields: Fields,
    *,
    windows: tuple[int | None, ...],
    ropes: tuple[RopeConfig | None, ...] | None = None,
    rotated: Sequence[bool] | None = None,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: QkNorm | None = None,
    attention_scale: float | None = None,
    merged: bool = False,
    gate: Activation | None = None,
    mlps: Sequence[BlockSpec] | None = None,
    eps: str = "rms_norm_eps",
    default_eps: float = 1e-6,
    default_theta: float = 10000.0,
    partial_rope: float | None = None,
    interleaved: bool = False,
    tie: bool = False,
    images: bool = False,
) -> ModelConfig:
    """Builds the `ModelConfig` from the fields that nearly all families share. Differences come as arguments;
    rare ones the family replaces in the result.

    `windows`, `ropes` and `mlps` have one entry per layer. `ropes`: None means the one of `rope_config` in
    all layers, or in those that are `rotated`. `mlps`: None means an MLP of `intermediate_size`, with the
    activation `gate` or the file's. `merged`: the checkpoint has q, k and v as one tensor, and gate and up as
    another. `eps`: the field with the norms' epsilon. `partial_rope`: the family rotates a part of each head,
    by default this one. `interleaved`: see `RopeConfig`. `head_dim`, `tie` and the `default_` arguments are
    the family's defaults for absent fields.
    Without any `head_dim` it is hidden_size / heads.
    """
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"{kv_heads} does not divide {heads} attention heads")
    if head_dim is None and "head_dim" not in fields and hidden % heads:
        raise fields.error("hidden_size", f"{hidden} is not a multiple of {heads} attention heads")
    dim = fields.size("head_dim", default=head_dim or max(1, hidden // heads))
    if dim % 2:
        raise fields.error("head_dim", f"{dim} is odd; rotary embeddings need pairs")
    max_position = fields.size("max_position_embeddings")
    if ropes is None:
        rope = rope_config(fields, default_theta, partial=partial_rope)
        if interleaved:
            rope = replace(rope, interleaved=True)
        check_share(rope, dim, fields)
        ropes = tuple(rope if turns else None for turns in rotated or [True] * len(windows))
        max_position = context_length(rope, max_position)
    attentions = [
        AttentionSpec(
            heads,
            kv_heads,
            dim,
            window=window,
            rope=rope,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qk_norm=qk_norm,
            scale=attention_scale,
            merged=merged,
        )
        for window, rope in zip(windows, ropes, strict=True)
    ]
    if mlps is None:
        size = fields.size("intermediate_size")
        mlps = [MlpSpec(size, gate or activation(fields), mlp_bias, merged)] * len(windows)
    dtype = fields.get("dtype", "") or fields.get("torch_dtype", "")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        max_position=max_position,
        eps=fields.number(eps, default=default_eps),
        tie=fields.get("tie_word_embeddings", tie),
        layer_specs=tuple(map(LayerSpec, attentions, mlps)),
        images=images,
        dtype=dtype.removeprefix("torch.") or None,
    )


def text_fields(fields: Fields, model_type: str, **defaults: Any) -> Fields:
    """The decoder's fields, in a config that may have a part for images too.

    They must be of that model type. `defaults` are the family's, because such files often leave them out. The
    dtype and the tying are those of the whole model.
    """
    text = fields.section("text_config")
    if text is None:
        return fields
    if text.get("model_type", model_type) != model_type:
        raise text.error(
            "model_type", f"{as_json(text.raw('model_type'))} is not supported, only {as_json(model_type)}"
        )
    shared = {
        name: fields.raw(name) for name in ("dtype", "torch_dtype", "tie_word_embeddings") if name in fields
    }
    return text.within(defaults, shared)


def activation(
    fields: Fields, name: str = "hidden_act", default: str = "silu", *, gated: bool = True
) -> Activation:
    """The activation function of an MLP's gate, or of an MLP without one."""
    found = fields.get(name, default)
    known = [given for given, kind in ACTIVATIONS.items() if not gated or kind in GATES]
    if found not in known:
        raise fields.error(name, f"{as_json(found)} is not supported, only {', '.join(known)}")
    return ACTIVATIONS[found]


def with_attention(config: ModelConfig, **changes: Any) -> ModelConfig:
    """The config with these fields of every layer's attention."""

    def change(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.attention, AttentionSpec | LatentAttentionSpec)
        return replace(layer, attention=replace(layer.attention, **changes))

    return config.with_layers(change)


def with_shared_keys(attentions: Sequence[AttentionSpec], own: int, fields: Fields) -> list[AttentionSpec]:
    """Each layer's attention. The first `own` layers have keys and values; each later one reads those of the
    last of them that is of its kind, with a window or without."""
    found = list(attentions[:own])
    for index, spec in enumerate(attentions[own:], own):
        kind = [at for at, other in enumerate(found[:own]) if (other.window is None) == (spec.window is None)]
        if not kind:
            raise fields.error("num_kv_shared_layers", f"layer {index} has no layer whose keys it can read")
        found.append(replace(spec, reads=kind[-1], keys_as_values=False, key=f"shared_{spec.key}"))
    return found


def with_scales(config: ModelConfig, fields: Fields) -> ModelConfig:
    """The config with Granite's scales."""
    return replace(
        config,
        embedding_scale=fields.number("embedding_multiplier", default=1.0),
        residual_scale=fields.number("residual_multiplier", default=1.0),
        logits_scale=1 / fields.number("logits_scaling", default=1.0),
    )


def sparse_layers(
    fields: Fields, dense: BlockSpec, sparse: BlockSpec, *, first: int | None = 0
) -> list[BlockSpec]:
    """The MLP of each layer: `dense` or `sparse` as `mlp_layer_types` says, or else `dense` in the first
    `first_k_dense_replace` layers, by default `first`. None: all layers are sparse without the former."""
    layers, kinds = fields.size("num_hidden_layers"), fields.raw("mlp_layer_types")
    count = 0 if first is None else fields.size("first_k_dense_replace", default=first, zero=True)
    if kinds is None:
        return [dense if layer < count else sparse for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not {*kinds} <= {"dense", "sparse"}:
        raise fields.error("mlp_layer_types", f"expected {layers} times 'dense' or 'sparse'")
    return [dense if kind == "dense" else sparse for kind in kinds]


def experts(fields: Fields) -> tuple[int, int]:
    """How many experts there are, and how many of them each token uses."""
    known = ("num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts")
    count = fields.size(next((name for name in known if name in fields), "num_experts"))
    name = next((name for name in ("moe_k", "moe_topk") if name in fields), "num_experts_per_tok")
    top_k = fields.size(name)
    if top_k > count:
        raise fields.error(name, f"{top_k} is more than the {count} experts")
    return count, top_k


def rope_config(
    fields: Fields,
    default_theta: float = 10000.0,
    *,
    partial: float | None = None,
    dynamic: bool = False,
) -> RopeConfig:
    """Reads the rotary embedding: from `rope_parameters`, or from `rope_theta` and `rope_scaling`. `partial`,
    `dynamic`: see `read_rope`."""
    rope = rope_section(fields)
    if any(isinstance(rope.raw(kind), dict) for kind in ("full_attention", "sliding_attention")):
        raise rope.error("full_attention", "rotary embeddings that differ by layer are not supported")
    return read_rope(rope, fields, default_theta, partial=partial, dynamic=dynamic)


def check_share(rope: RopeConfig, head_dim: int, fields: Fields) -> None:
    """Raises ModelLoadError if the rotated part of a head has no pairs."""
    turned = int(head_dim * rope.share)
    if turned % 2 or not turned:
        raise fields.error(
            "partial_rotary_factor", f"{rope.share:g} of {head_dim} dimensions cannot form pairs"
        )


def read_rope(
    rope: Fields,
    fields: Fields,
    default_theta: float,
    *,
    partial: float | None = None,
    scaled: bool = False,
    dynamic: bool = False,
) -> RopeConfig:
    """Reads the section `rope`; `fields` are those of the file. `partial`: the part of a head that the family
    rotates if the file does not say; None for families that always rotate the whole head. `scaled`: the
    family reads `llama_4_scaling_beta`. `dynamic`: its files name a scaling of that type."""
    if not scaled and "llama_4_scaling_beta" in rope:
        raise rope.error("llama_4_scaling_beta", "scores that are scaled by position are not supported")
    found = _read_rope(rope, fields, default_theta, partial is not None, dynamic)
    if partial is None:
        return found
    place = rope if "partial_rotary_factor" in rope else fields
    return replace(found, share=place.number("partial_rotary_factor", default=partial, high=1.0))


def _read_rope(
    rope: Fields, fields: Fields, default_theta: float, partial: bool, dynamic: bool
) -> RopeConfig:
    theta = rope_theta(rope, fields, default_theta)
    for place in (fields, rope):
        if not partial and place.get("partial_rotary_factor", 1.0) != 1.0:
            raise place.error(
                "partial_rotary_factor", "a rotary embedding over a part of the head is not supported"
            )
    kind = rope_type(rope)
    for name in MEANINGLESS_ROPE:
        rope.raw(name)
    original_in = fields if "original_max_position_embeddings" in fields else rope
    if kind == "default":
        return RopeConfig(theta)
    if (
        kind == "dynamic" and dynamic
    ):  # it changes only contexts longer than the model's, which are not served
        rope.raw("factor")
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", factor=rope.number("factor"))
    if kind not in ("llama3", "yarn"):
        raise rope.error(
            "rope_type", f"{as_json(kind)} is not supported, only default, linear, llama3 and yarn"
        )
    max_position = fields.size("max_position_embeddings")
    original = original_in.size("original_max_position_embeddings", default=max_position)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise rope.error("high_freq_factor", f"{high:g} must be over low_freq_factor, {low:g}")
        return RopeConfig(theta, "llama3", rope.number("factor"), original, low, high)
    return RopeConfig(
        theta,
        "yarn",
        factor=rope.number("factor") if "factor" in rope else max_position / original,
        original_max_position=original,
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        truncate=rope.get("truncate", True),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
    )


def long_rope(rope: Fields, fields: Fields, theta: float, pairs: int, *, original: int) -> RopeConfig:
    """LongRoPE, with factors for each of `pairs`. `original`: the context length before scaling, if the file
    does not say."""
    place = rope if "original_max_position_embeddings" in rope else fields
    original = place.size("original_max_position_embeddings", default=original)
    return RopeConfig(
        theta,
        "longrope",
        factor=rope.number("factor")
        if "factor" in rope
        else fields.size("max_position_embeddings") / original,
        original_max_position=original,
        attention_factor=rope.optional_number("attention_factor"),
        short_factors=_factors(rope, "short_factor", pairs),
        long_factors=_factors(rope, "long_factor", pairs),
    )


def _factors(rope: Fields, name: str, pairs: int) -> tuple[float, ...]:
    values = rope.raw(name)
    if not isinstance(values, list) or len(values) != pairs:
        raise rope.error(name, f"expected a list of {pairs} numbers")
    for value in values:
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise rope.error(name, f"{as_json(value)} is not a number over 0")
    return tuple(map(float, values))


def rope_theta(rope: Fields, fields: Fields, default: float) -> float:
    """The base of the rotary embedding: that of its section, or else that of the file."""
    base = fields.number("rope_theta", default=default)
    return rope.number("rope_theta", default=base)


def rope_section(fields: Fields) -> Fields:
    """The section with the rotary embedding's fields. Older files have some of these at the top."""
    return fields.section("rope_parameters") or fields.section("rope_scaling") or Fields({}, fields.where)


def rope_type(rope: Fields) -> str:
    """The type of rope scaling, by the file's name for it."""
    old = rope.get("type", "default")
    return rope.get("rope_type", "") or old


def context_length(rope: RopeConfig, max_position: int) -> int:
    """The longest context in tokens. Files with `linear` or `yarn` may give the length before scaling."""
    if rope.type == "linear":
        return math.floor(max_position * rope.factor)
    if rope.type == "yarn":
        return max(max_position, math.floor(rope.original_max_position * rope.factor))
    return max_position


def rope_sections(fields: Fields) -> tuple[Fields | None, Fields | None]:
    """The sections for layers with a window and for those without. GPTQModel also writes a type and a base
    for all layers, which mean nothing."""
    rope = rope_section(fields)
    near, far = rope.section("sliding_attention"), rope.section("full_attention")
    if near is not None and far is not None:
        for name in ("rope_type", "rope_theta"):
            rope.raw(name)
    return near, far


def ropes_by_window(
    fields: Fields, windows: Sequence[int | None], *, local: str, theta: float, local_theta: float
) -> tuple[RopeConfig, ...]:
    """The rotary embedding of each layer: layers with a window have a different one.

    Before transformers 5, `rope_theta` and `rope_scaling` applied to the layers without a window, and the
    field `local` had the base of the others. `theta`, `local_theta`: the bases if the file has none.
    """
    near, far = rope_sections(fields)
    local_theta = fields.number(local, default=local_theta)
    if near is None or far is None:
        near_rope = RopeConfig(local_theta)
        far_rope = read_rope(rope_section(fields), fields, theta)
    else:
        near_rope, far_rope = read_rope(near, fields, local_theta), read_rope(far, fields, theta)
    return tuple(far_rope if window is None else near_rope for window in windows)


def uniform_windows(fields: Fields, window: int | None) -> tuple[int | None, ...]:
    """The same window in every layer. If the file has `layer_types`, they must agree."""
    layers = fields.size("num_hidden_layers")
    expected = "full_attention" if window is None else "sliding_attention"
    if "layer_types" in fields and fields.raw("layer_types") != [expected] * layers:
        raise fields.error("layer_types", f"expected {layers} times {as_json(expected)}")
    return (window,) * layers


def mixed_windows(fields: Fields, windowed: Sequence[bool] | None = None) -> tuple[int | None, ...]:
    """With `use_sliding_window`: the window in the layers that `layer_types` names, or else in those that are
    `windowed`. None means Qwen's rule: from layer `max_window_layers` on."""
    layers = fields.size("num_hidden_layers")
    if windowed is None:
        first = fields.get("max_window_layers", 28)
        windowed = [layer >= first for layer in range(layers)]
    return windows_by_type(fields, switched_window(fields), windowed)


def switched_window(fields: Fields) -> int | None:
    """The window of `sliding_window`, if `use_sliding_window` switches it on. Without it, files have the
    window, and the layers that would have it, all the same."""
    window = fields.size("sliding_window") if "sliding_window" in fields else None
    fields.raw("max_window_layers")
    return window if fields.get("use_sliding_window", False) else None


def layer_kinds(fields: Fields, known: Sequence[str], usual: Sequence[str]) -> Sequence[str]:
    """The kind of each layer: what `layer_types` says, one of `known`, or else `usual`."""
    layers, kinds = fields.size("num_hidden_layers"), fields.raw("layer_types")
    if kinds is None:
        return usual
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        names = " or ".join(map(as_json, known))
        raise fields.error("layer_types", f"expected {layers} times {names}, found {as_json(kinds)}")
    return kinds


def windows_by_type(fields: Fields, window: int | None, windowed: Sequence[bool]) -> tuple[int | None, ...]:
    """The window in the layers that `layer_types` names, or else in those that are `windowed`."""
    layers, kinds = len(windowed), fields.raw("layer_types")
    if kinds is None:
        return tuple(window if has_window else None for has_window in windowed)
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.error("layer_types", f"expected a list of {layers} names, found {as_json(kinds)}")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.error("layer_types", f"{as_json(kind)} is not supported")
        if kind == "sliding_attention" and window is None:
            raise fields.error("layer_types", "names sliding_attention, but there is no window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def grouped_experts(
    fields: Fields,
    *,
    shared: str = "n_shared_experts",
    default_shared: int = 1,
    default_scale: float = 1.0,
    renormalize: bool = True,
    correction: str = "gate.e_score_correction_bias",
) -> MoeSpec:
    """DeepSeek V3's experts, which several families have: chosen by sigmoid with a correction, in groups,
    with shared experts. `shared`: the field with their number. The `default_` arguments and `renormalize` are
    the family's defaults for absent fields."""
    count, top_k = experts(fields)
    gate, size = activation(fields), fields.size("moe_intermediate_size")
    groups = fields.size("n_group", default=1)
    kept = fields.size("topk_group", default=1)
    if count % groups or (groups > 1 and count // groups < 2):
        raise fields.error("n_group", f"{count} experts do not form {groups} groups of at least two")
    if kept > groups or kept * (count // groups) < top_k:
        raise fields.error("topk_group", f"{kept} of {groups} groups do not have {top_k} experts")
    common = fields.size(shared, default=default_shared, zero=True) * size
    return MoeSpec(
        count,
        size,
        Routing(
            top_k,
            fields.get("norm_topk_prob", renormalize),
            "sigmoid",
            groups,
            kept,
            fields.number("routed_scaling_factor", default=default_scale),
            epsilon=1e-20,
        ),
        activation=gate,
        correction=correction,
        shared=MlpSpec(common, gate, path="mlp.shared_experts", key="shared_") if common else None,
    )
