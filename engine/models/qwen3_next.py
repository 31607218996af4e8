"""Qwen3-Next, Qwen3.5 and Qwen3.6: gated delta nets in three of four layers, attention with an output gate in
the others. A quarter of each head is rotated. Some have a mixture of experts with a shared one. Layers for
further tokens and the part that reads images are not used."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.block import BlockSpec, LayerSpec
from personae.engine.layers.delta_net import DeltaNetSpec
from personae.engine.layers.mlp import MlpSpec
from personae.engine.layers.moe import FusedExperts, MoeSpec
from personae.engine.models.common import (
    activation,
    decoder_config,
    experts,
    layer_kinds,
    rope_section,
    switched_window,
    text_fields,
    with_attention,
)
from personae.errors import as_json
from personae.kernels.moe import Routing

KINDS = ("linear_attention", "full_attention")


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Qwen3-Next's `config.json`, and that of Qwen3.5, which may have a part for images."""
    images = "text_config" in fields
    sparse = "Moe" in architecture or architecture == "Qwen3NextForCausalLM"
    fields = text_fields(fields, "qwen3_5_moe_text" if sparse else "qwen3_5_text")
    rope = rope_section(fields)
    for name in ("mrope_section", "mrope_interleaved"):
        rope.raw(name)  # all parts of a text's position are the same
    if switched_window(fields) is not None:
        raise fields.error("use_sliding_window", "windows are not supported")
    fields.raw("mtp_use_dedicated_embeddings")
    for name, only in {"attn_output_gate": True, "mamba_ssm_dtype": "float32"}.items():
        if fields.raw(name) not in (None, only):
            raise fields.error(name, f"only {as_json(only)} is supported")
    layers, every = fields.size("num_hidden_layers"), fields.size("full_attention_interval", default=4)
    usual = [KINDS[(layer + 1) % every == 0] for layer in range(layers)]
    kinds = layer_kinds(fields, KINDS, usual)
    bias, next_ = fields.get("attention_bias", False), architecture == "Qwen3NextForCausalLM"
    config = decoder_config(
        architecture,
        fields,
        windows=(None,) * layers,
        head_dim=256,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        mlps=_mlps(fields, layers, next_=next_) if sparse else None,
        partial_rope=0.25,
        images=images,
    )
    config = with_attention(config, gated=True)
    key_heads = fields.size("linear_num_key_heads", default=16)
    heads = fields.size("linear_num_value_heads", default=32)
    if heads % key_heads:
        raise fields.error("linear_num_value_heads", f"{heads} is not a multiple of {key_heads} key heads")
    delta = DeltaNetSpec(
        heads,
        key_heads,
        fields.size("linear_key_head_dim", default=128),
        fields.size("linear_value_head_dim", default=128),
        fields.size("linear_conv_kernel_dim", default=4),
        next_,
        config.eps,
    )
    return replace(
        config,
        layer_specs=tuple(
            LayerSpec(delta, layer.mlp) if kind == KINDS[0] else layer
            for kind, layer in zip(kinds, config.layer_specs, strict=True)
        ),
        norm_offset=1.0,
        mtp_layers=fields.size("mtp_num_hidden_layers", default=1, zero=True),
    )


def _mlps(fields: Fields, layers: int, *, next_: bool) -> list[BlockSpec]:
    """Qwen2-MoE's experts. Qwen3.5's files have those of a layer as one tensor."""
    gate, (count, top_k) = activation(fields), experts(fields)
    shared = MlpSpec(
        fields.size("shared_expert_intermediate_size", default=512),
        gate,
        path="mlp.shared_expert",
        key="shared_",
    )
    sparse = MoeSpec(
        count,
        fields.size("moe_intermediate_size", default=512),
        Routing(top_k, fields.get("norm_topk_prob", True) if next_ else True),
        activation=gate,
        shared=shared,
        shared_gate="shared_expert_gate",
        fused=None if next_ else FusedExperts("experts.gate_up_proj", "experts.down_proj", suffix=""),
    )
    if not next_:
        return [sparse] * layers
    dense = MlpSpec(fields.size("intermediate_size"), gate)
    plain, step = fields.raw("mlp_only_layers") or [], fields.size("decoder_sparse_step", default=1)
    return [dense if layer in plain or (layer + 1) % step else sparse for layer in range(layers)]
