"""Gemma 4's decoder.

Layers with a window and layers without have heads of different sizes, and rotary embeddings of their own.
Values have a norm without weights, and in some models they are the keys. The last layers may read the keys
and values of earlier ones, with MLPs of twice the size, and the small models have embeddings for each layer.
The parts that read images and sound are not used.
"""

from collections.abc import Sequence
from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.attention import AttentionSpec
from personae.engine.layers.block import BlockSpec, LayerSpec, NoBlockSpec
from personae.engine.layers.dense_and_experts import DenseAndExpertsSpec
from personae.engine.layers.mlp import Activation, MlpSpec
from personae.engine.layers.moe import FusedExperts, MoeSpec
from personae.engine.layers.per_layer_embedding import PerLayerInputSpec
from personae.engine.layers.rotary import RopeConfig
from personae.engine.models.common import (
    AFTER,
    SANDWICH,
    activation,
    decoder_config,
    read_rope,
    rope_sections,
    rope_theta,
    rope_type,
    text_fields,
    windows_by_type,
    with_shared_keys,
)
from personae.kernels.moe import Routing

DEFAULTS = {  # transformers' defaults; files of models with images may have only what differs
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}
ONCE = ("input_layernorm",) * 2, ("post_attention_layernorm",) * 2
"""The norms of layers whose MLP is part of a block with norms of its own."""


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Gemma 4's `config.json`."""
    images, fields = "text_config" in fields, text_fields(fields, "gemma4_text", **DEFAULTS)
    if fields.raw("use_bidirectional_attention") not in (None, "vision"):
        raise fields.error(
            "use_bidirectional_attention", 'only "vision" is supported, which leaves texts alone'
        )
    layers, gate = (
        fields.size("num_hidden_layers"),
        activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
    )
    windowed = [(layer + 1) % 6 != 0 for layer in range(layers)]
    windows = list(windows_by_type(fields, fields.size("sliding_window", default=512), windowed))
    windows[-1] = None  # as in transformers, whatever the file says
    bias, size = fields.get("attention_bias", False), fields.size("intermediate_size")
    shared = fields.size("num_kv_shared_layers", default=0, zero=True)
    if shared >= layers:
        raise fields.error("num_kv_shared_layers", f"{shared} of {layers} layers leave none to share")
    wide = fields.get("use_double_wide_mlp", False)
    dense, double = MlpSpec(size, gate), MlpSpec(2 * size, gate, key="wide_")
    config = decoder_config(
        architecture,
        fields,
        windows=tuple(windows),
        ropes=_ropes(fields, windows),
        head_dim=256,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        attention_scale=1.0,
        mlps=[double if wide and layer >= layers - shared else dense for layer in range(layers)],
        tie=True,
        images=images,
    )
    per_layer = fields.size("hidden_size_per_layer_input", default=256, zero=True)
    if "hidden_size_per_layer_input" not in fields and fields.given("hidden_size_per_layer_input"):
        per_layer = 0  # a null says so
    tokens = fields.size("vocab_size_per_layer_input", default=262144)
    if per_layer and tokens < config.vocab_size:
        raise fields.error("vocab_size_per_layer_input", f"{tokens} is less than {config.vocab_size} tokens")
    further: BlockSpec | None = PerLayerInputSpec(per_layer, gate) if per_layer else None
    moe = _experts(fields, gate)
    if moe is not None and per_layer:
        raise fields.error("hidden_size_per_layer_input", "is not supported in a mixture of experts")
    attentions = _attentions(fields, config, layers - shared)
    return replace(
        config,
        layer_specs=tuple(
            LayerSpec(attention, layer.mlp, further) if moe is None else _sparse(attention, layer.mlp, moe)
            for attention, layer in zip(attentions, config.layer_specs, strict=True)
        ),
        pre_norms=SANDWICH if moe is None else ONCE[0],
        post_norms=AFTER if moe is None else ONCE[1],
        embedding_scale=config.hidden_size**0.5,
        logits_softcap=fields.optional_number("final_logit_softcapping"),
        per_layer_embedding=(per_layer, tokens) if per_layer else None,
        layer_scalars=True,
    )


def _experts(fields: Fields, gate: Activation) -> MoeSpec | None:
    """The experts that stand next to each MLP, if there are some."""
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        fields.raw(name)
    if not fields.get("enable_moe_block", False):
        return None
    count, top_k = fields.size("num_experts"), fields.size("top_k_experts")
    if top_k > count:
        raise fields.error("top_k_experts", f"{top_k} is more than the {count} experts")
    return MoeSpec(
        count,
        fields.size("moe_intermediate_size"),
        Routing(top_k, renormalize=True),
        activation=gate,
        path="",
        router="router.proj",
        router_scale="router.scale",
        expert_scale="router.per_expert_scale",
        fused=FusedExperts("experts.gate_up_proj", "experts.down_proj", suffix=""),
    )


def _sparse(attention: BlockSpec, mlp: BlockSpec, moe: MoeSpec) -> LayerSpec:
    """A layer with an MLP and experts, which have their own norms."""
    assert isinstance(mlp, MlpSpec)
    return LayerSpec(attention, NoBlockSpec(), DenseAndExpertsSpec(mlp, moe))


def _ropes(fields: Fields, windows: Sequence[int | None]) -> tuple[RopeConfig, ...]:
    """The rotary embedding of each layer. That of layers without a window rotates a part of the pairs."""
    near, far = rope_sections(fields)
    near_rope, far_rope = RopeConfig(10000.0), RopeConfig(1000000.0, "proportional", proportion=0.25)
    if near is not None:
        near_rope = read_rope(near, fields, 10000.0)
    if far is not None and rope_type(far) != "proportional":
        far_rope = read_rope(far, fields, 1000000.0)
    elif far is not None:
        far_rope = RopeConfig(
            rope_theta(far, fields, 1000000.0),
            "proportional",
            far.number("factor", default=1.0),
            proportion=far.number("partial_rotary_factor", default=1.0, high=1.0),
        )
    return tuple(far_rope if window is None else near_rope for window in windows)


def _attentions(fields: Fields, config: ModelConfig, own: int) -> list[AttentionSpec]:
    """Each layer's attention. The first `own` layers have keys and values; each later one reads those of the
    last of them that is of its kind."""
    equal = fields.get("attention_k_eq_v", False)
    dim = fields.size("global_head_dim", default=512)
    heads = fields.size("num_key_value_heads")
    full_heads = fields.size("num_global_key_value_heads", default=heads) if equal else heads
    fields.raw("num_global_key_value_heads")
    given = fields.section("per_layer_config")  # transformers writes it instead of the fields above
    found: list[AttentionSpec] = []
    for index, layer in enumerate(config.layer_specs):
        spec = layer.attention
        assert isinstance(spec, AttentionSpec)
        spec = replace(spec, value_norm=True)
        full = spec.window is None
        if full:
            spec = replace(spec, head_dim=dim, kv_heads=full_heads, keys_as_values=equal, key="full_")
        changes = given.section(str(index)) if given is not None else None
        if changes is not None:
            spec = replace(
                spec,
                head_dim=changes.size("head_dim", default=spec.head_dim),
                kv_heads=changes.size("num_key_value_heads", default=spec.kv_heads),
            )
        if spec.heads % spec.kv_heads or spec.head_dim % 2:
            raise fields.error(
                "num_global_key_value_heads" if full else "num_key_value_heads",
                f"{spec.heads} heads of {spec.head_dim} do not fit {spec.kv_heads} key and value heads",
            )
        found.append(spec)
    return with_shared_keys(found, own, fields)
