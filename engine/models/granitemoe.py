"""Granite 3's mixtures of experts, and Granite 4 without state layers (micro, 1B, 350M): Granite's scales,
and experts, an MLP for every token, or both."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.block import BlockSpec
from personae.engine.layers.mlp import MlpSpec
from personae.engine.layers.moe import FusedExperts, MoeSpec
from personae.engine.models.common import activation, decoder_config, experts, with_scales
from personae.kernels.moe import Routing

FUSED = FusedExperts("input_linear", "output_linear")
STATE_LAYERS = ("linear_attention", "mamba")
UNUSED = (  # of the state layers, which none of the served models has
    *("mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state"),
    *("mamba_expand", "mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "time_step_limit"),
)


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """The `config.json` of all three. Granite 4 has a rotary embedding only where `position_embedding_type`
    says so."""
    hybrid, layers = architecture == "GraniteMoeHybridForCausalLM", fields.size("num_hidden_layers")
    rotated = True
    if hybrid:
        kinds = fields.raw("layer_types") or ["linear_attention"] * layers
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise fields.error("layer_types", f"expected a list of {layers} names, found {kinds!r}")
        for kind in kinds:
            if kind not in ("attention", "full_attention"):
                raise fields.error("layer_types", f"layers of {kind!r} are not supported, only attention")
        for name in (*UNUSED, "init_method", "normalization_function"):
            fields.raw(name)
        position = fields.raw("position_embedding_type")
        if position not in (None, "nope", "rope"):
            raise fields.error(
                "position_embedding_type", f"{position!r} is not supported, only rope and nope"
            )
        rotated = position == "rope"
    bias = fields.get("attention_bias", False)
    config = decoder_config(
        architecture,
        fields,
        windows=(None,) * layers,
        rotated=[rotated] * layers,
        qkv_bias=bias,
        o_bias=bias,
        attention_scale=fields.number("attention_multiplier", default=1.0),
        mlps=[_mlp(architecture, fields)] * layers,
    )
    return with_scales(config, fields)


def _mlp(architecture: str, fields: Fields) -> BlockSpec:
    """Experts, an MLP for every token, or both."""
    gate, shared = activation(fields), None
    if architecture != "GraniteMoeForCausalLM":
        hybrid = architecture == "GraniteMoeHybridForCausalLM"
        size = fields.size("shared_intermediate_size", default=1024 if hybrid else 0, zero=True)
        names = ("input_linear", "output_linear")
        shared = MlpSpec(size, gate, merged=True, path="shared_mlp", names=names, key="shared_")
        if hybrid and fields.size("num_local_experts", default=8, zero=True) == 0:
            fields.raw("num_experts_per_tok"), fields.raw("intermediate_size")
            return replace(shared, key="")
        shared = shared if size else None
    count, top_k = experts(fields)
    return MoeSpec(
        count,
        fields.size("intermediate_size"),
        Routing(top_k, renormalize=True),
        activation=gate,
        path="block_sparse_moe",
        router="router.layer",
        router_module="router",
        shared=shared,
        fused=FUSED,
    )
