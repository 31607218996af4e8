"""DeepSeek V2 and V3, and the families with their latent attention: Kimi K2 and Moonlight (which are DeepSeek
V3 in their files), GLM-4.7-Flash, Mistral Small 4, MiniCPM3 and Youtu-LLM. Layers for further tokens are not
used."""

import math
from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.attention import AttentionSpec
from personae.engine.layers.block import BlockSpec, LayerSpec
from personae.engine.layers.latent_attention import LatentAttentionSpec
from personae.engine.layers.mlp import MlpSpec
from personae.engine.layers.moe import FusedExperts, MoeSpec
from personae.engine.layers.rotary import RopeConfig
from personae.engine.models.common import (
    activation,
    decoder_config,
    grouped_experts,
    long_rope,
    read_rope,
    rope_section,
    rope_theta,
    rope_type,
    sparse_layers,
    uniform_windows,
    with_attention,
)
from personae.errors import as_json

CHOICES = {
    "DeepseekV2ForCausalLM": ("softmax", ("greedy", "group_limited_greedy")),
    "DeepseekV3ForCausalLM": ("sigmoid", ("noaux_tc",)),
    "Glm4MoeLiteForCausalLM": ("sigmoid", ("noaux_tc",)),
}
"""What a family's files say of its routing, if they do: `scoring_func` and `topk_method`."""


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """DeepSeek's `config.json`, and those of the other families."""
    if architecture == "DeepseekV2ForCausalLM":
        return _latent(architecture, fields, sparse_layers(fields, _dense(fields), _softmax_experts(fields)))
    if architecture == "MiniCPM3ForCausalLM":
        return _minicpm3(architecture, fields)
    if architecture == "YoutuForCausalLM":
        return _latent(architecture, fields, None, tie=True)
    if architecture == "Mistral4ForCausalLM":
        return mistral4(architecture, fields)
    lite = architecture == "Glm4MoeLiteForCausalLM"
    if lite:
        fields = fields.within({"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256}, {})
    else:
        fields = fields.within({"n_group": 8, "topk_group": 4}, {})
    _check_choice(architecture, fields)
    moe = grouped_experts(fields, default_scale=1.8 if lite else 2.5)
    config = _latent(
        architecture,
        fields,
        sparse_layers(fields, _dense(fields), moe, first=1 if lite else 3),
        eps=1e-5 if lite else 1e-6,
    )
    return replace(config, mtp_layers=fields.size("num_nextn_predict_layers", default=1, zero=True))


def _latent(
    architecture: str,
    fields: Fields,
    mlps: list[BlockSpec] | None,
    *,
    interleaved: bool = True,
    eps: float = 1e-6,
    tie: bool = False,
    rope: RopeConfig | None = None,
) -> ModelConfig:
    """A decoder with latent attention in each layer. `eps`: of all norms but those of latent vectors, if the
    file does not say. `rope`: None means the one of `rope_config`."""
    fields.raw("qk_head_dim")  # the sum of both parts
    turned = fields.size("qk_rope_head_dim", default=64)
    wide = fields.within({}, {"head_dim": turned})
    config = decoder_config(
        architecture,
        wide,
        windows=uniform_windows(fields, None),
        ropes=None if rope is None else (rope,) * fields.size("num_hidden_layers"),
        mlps=mlps,
        default_eps=eps,
        interleaved=fields.get("rope_interleave", True) if interleaved else False,
        tie=tie,
    )
    bias = fields.get("attention_bias", False)
    query_latent = None if fields.given("q_lora_rank") and fields.raw("q_lora_rank") is None else 1536
    heads = fields.size("num_attention_heads")

    def attention(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.attention, AttentionSpec)
        assert layer.attention.rope is not None
        return replace(
            layer,
            attention=LatentAttentionSpec(
                heads,
                fields.size("qk_nope_head_dim", default=128),
                turned,
                fields.size("v_head_dim", default=128),
                fields.size("kv_lora_rank", default=512),
                layer.attention.rope,
                query_latent and fields.size("q_lora_rank", default=query_latent),
                bias,
            ),
        )

    return config.with_layers(attention)


def _dense(fields: Fields) -> MlpSpec:
    return MlpSpec(fields.size("intermediate_size"), activation(fields))


def _check_choice(architecture: str, fields: Fields) -> None:
    score, methods = CHOICES[architecture]
    if fields.get("scoring_func", score) != score:
        raise fields.error("scoring_func", f"only {as_json(score)} is supported for {architecture}")
    if fields.get("topk_method", methods[0]) not in methods:
        raise fields.error("topk_method", f"only {' and '.join(map(as_json, methods))} are supported")
    if fields.size("moe_layer_freq", default=1) != 1:
        raise fields.error("moe_layer_freq", "only 1 is supported: experts in every layer after the first")


def _softmax_experts(fields: Fields) -> MoeSpec:
    """DeepSeek V2's: chosen by softmax without a correction, in groups with `group_limited_greedy`."""
    _check_choice("DeepseekV2ForCausalLM", fields)
    grouped = fields.get("topk_method", "greedy") == "group_limited_greedy"
    if not grouped:
        fields.raw("n_group"), fields.raw("topk_group")
        fields = fields.within({}, {"n_group": 1, "topk_group": 1})
    if fields.get("norm_topk_prob", False):
        raise fields.error("norm_topk_prob", "is not supported for DeepSeek V2")
    moe = grouped_experts(fields, default_shared=2)
    routing = replace(moe.routing, score="softmax", renormalize=False, epsilon=0.0)
    return replace(moe, routing=routing, correction=None)


def mistral4(architecture: str, fields: Fields) -> ModelConfig:
    """Mistral Small 4: queries are scaled by position, experts are chosen by softmax."""
    fields = fields.within({"q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64}, {})
    if fields.size("n_group", default=1) != 1:
        raise fields.error("n_group", "groups of experts are not supported for Mistral 4")
    moe = grouped_experts(fields)
    moe = replace(
        moe,
        routing=replace(moe.routing, score="softmax"),
        correction=None,
        fused=FusedExperts("experts.gate_up_proj", "experts.down_proj", suffix=""),
    )
    rope = rope_section(fields)
    if "rope_parameters" not in fields:
        raise fields.error("rope_parameters", "is missing")
    rope.raw("max_position_embeddings")
    beta = rope.optional_number("llama_4_scaling_beta")
    original = rope.size("original_max_position_embeddings") if beta else 0
    config = _latent(
        architecture,
        fields,
        sparse_layers(fields, _dense(fields), moe),
        rope=replace(
            read_rope(rope, fields, 10000.0, partial=1.0, scaled=True),
            share=1.0,  # of the part that is rotated, which the file counts as a part of the whole key
            interleaved=fields.get("rope_interleave", True),
        ),
    )
    return with_attention(config, position_scale=(beta, original, 0) if beta else None)


def _minicpm3(architecture: str, fields: Fields) -> ModelConfig:
    """MiniCPM3: scales, and the halves of a key are rotated, mostly by LongRoPE."""
    heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    sizes = {"q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
    fields = fields.within({**sizes, "scale_depth": 1.4, "dim_model_base": 256}, {})
    if "v_head_dim" not in fields:
        fields = fields.within({}, {"v_head_dim": hidden // heads})
    section, rope = rope_section(fields), None
    if rope_type(section) == "longrope":
        theta, pairs = rope_theta(section, fields, 10000.0), fields.size("qk_rope_head_dim", default=32) // 2
        original = fields.size("max_position_embeddings")
        rope = long_rope(section, fields, theta, pairs, original=original)
    config = _latent(architecture, fields, None, interleaved=False, eps=1e-5, tie=True, rope=rope)
    root = math.sqrt(config.layers)
    return replace(
        config,
        embedding_scale=fields.number("scale_emb", default=12.0),
        residual_scale=fields.number("scale_depth", default=root) / root,
        logits_scale=fields.size("dim_model_base", default=hidden) / hidden,
    )
