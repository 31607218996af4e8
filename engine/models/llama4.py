"""Llama 4: experts whose weight multiplies their input, with a shared expert. Three of four layers attend
within chunks of the context, with an interleaved rotary embedding and norms without weights behind it; the
others see everything, without an embedding. The part that reads images is not used."""

from collections.abc import Callable
from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.attention import AttentionSpec
from personae.engine.layers.block import BlockSpec, LayerSpec
from personae.engine.layers.mlp import MlpSpec
from personae.engine.layers.moe import FusedExperts, MoeSpec
from personae.engine.models.common import activation, decoder_config, experts, layer_kinds, text_fields
from personae.errors import as_json
from personae.kernels.moe import Routing

DEFAULTS = {  # transformers' defaults; files of models with images may have only what differs
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
}
PATH = "feed_forward"
CHUNKED, FULL = "chunked_attention", "full_attention"


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Llama 4's `config.json`. `attention_bias` covers q, k, v and o."""
    images, fields = "text_config" in fields, text_fields(fields, "llama4_text", **DEFAULTS)
    layers, bias = fields.size("num_hidden_layers"), fields.get("attention_bias", False)
    every = fields.size("no_rope_layer_interval", default=4)
    rotated = _rotated(fields, [(layer + 1) % every != 0 for layer in range(layers)])
    kinds = layer_kinds(fields, (CHUNKED, FULL), [CHUNKED if turns else FULL for turns in rotated])
    config = decoder_config(
        architecture,
        fields,
        windows=(None,) * layers,
        rotated=rotated,
        head_dim=128,
        qkv_bias=bias,
        o_bias=bias,
        mlps=_mlps(fields, layers),
        default_eps=1e-5,
        default_theta=500000.0,
        interleaved=True,
        images=images,
    )
    change = _attention(fields)
    specs = []
    for kind, layer in zip(kinds, config.layer_specs, strict=True):
        assert isinstance(layer.attention, AttentionSpec)
        specs.append(LayerSpec(change(kind, layer.attention), layer.mlp))
    return replace(config, layer_specs=tuple(specs))


def _rotated(fields: Fields, usual: list[bool]) -> list[bool]:
    """Which layers have a rotary embedding: 1 or 0 for each, in spite of the field's name."""
    given = fields.raw("no_rope_layers") or usual
    if not isinstance(given, list) or len(given) != len(usual) or any(each not in (0, 1) for each in given):
        raise fields.error("no_rope_layers", f"expected {len(usual)} times 0 or 1, found {as_json(given)}")
    return [bool(each) for each in given]


def _attention(fields: Fields) -> Callable[[str, AttentionSpec], AttentionSpec]:
    """What a layer of some kind changes in its attention."""
    chunk = None
    if "attention_chunk_size" in fields or not fields.given("attention_chunk_size"):  # a null says no
        chunk = fields.size("attention_chunk_size", default=8192)
    normed = fields.get("use_qk_norm", True)
    tuned = fields.raw("attn_temperature_tuning")  # a number in some files
    scale = fields.number("attn_scale", default=0.1), fields.size("floor_scale", default=8192), 1

    def change(kind: str, spec: AttentionSpec) -> AttentionSpec:
        spec = replace(spec, chunk=chunk if kind == CHUNKED else None, norms=None)
        if spec.rope is not None:
            return replace(spec, qk_norm="head" if normed else None, normed_after_rope=True)
        return replace(spec, position_scale=scale if tuned is None or tuned else None)

    return change


def _mlps(fields: Fields, layers: int) -> list[BlockSpec]:
    """Experts in the layers of `moe_layers`, or else in every `interleave_moe_layer_step`th."""
    gate, size, (count, top_k) = activation(fields), fields.size("intermediate_size"), experts(fields)
    step = fields.size("interleave_moe_layer_step", default=1)
    sparse = fields.raw("moe_layers")
    if sparse is None:
        sparse = [*range(step - 1, layers, step)]
    if not isinstance(sparse, list) or any(layer not in range(layers) for layer in sparse):
        raise fields.error("moe_layers", f"expected numbers of the {layers} layers, found {as_json(sparse)}")
    dense = MlpSpec(fields.size("intermediate_size_mlp"), gate, path=PATH)
    moe = MoeSpec(
        count,
        size,
        Routing(top_k, renormalize=False, score="sigmoid"),
        activation=gate,
        path=PATH,
        router="router",
        weighs_input=True,
        shared=MlpSpec(size, gate, path=f"{PATH}.shared_expert", key="shared_"),
        fused=FusedExperts("experts.gate_up_proj", "experts.down_proj", suffix="", transposed=True),
    )
    return [moe if layer in sparse else dense for layer in range(layers)]
