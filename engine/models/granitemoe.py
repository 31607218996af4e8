"""Granite 3's mixtures of experts, and Granite 4: Granite's scales, and experts, an MLP for every token, or
both. Granite 4's H models have Mamba-2 instead of attention in most layers."""

from dataclasses import replace
from math import inf

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.block import BlockSpec
from personae.engine.layers.mamba import MambaSpec
from personae.engine.layers.mlp import MlpSpec
from personae.engine.layers.moe import FusedExperts, MoeSpec
from personae.engine.models.common import activation, decoder_config, experts, layer_kinds, with_scales
from personae.errors import as_json
from personae.kernels.moe import Routing

FUSED = FusedExperts("input_linear", "output_linear")
STATE_LAYERS = ("linear_attention", "mamba")
MAMBA_KEYS = (  # the keys that `mamba_spec` may read
    *("mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_expand"),
    *("mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "time_step_limit"),
)


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """The `config.json` of all three. Granite 4 has a rotary embedding only where `position_embedding_type`
    says so."""
    hybrid, layers = architecture == "GraniteMoeHybridForCausalLM", fields.size("num_hidden_layers")
    rotated = True
    if hybrid:
        known = (*STATE_LAYERS, "attention", "full_attention")
        kinds = layer_kinds(fields, known, ["linear_attention"] * layers)
        for name in (*MAMBA_KEYS, "mamba_chunk_size", "init_method", "normalization_function"):
            fields.raw(name)
        position = fields.raw("position_embedding_type")
        if position not in (None, "nope", "rope"):
            raise fields.error(
                "position_embedding_type", f"{as_json(position)} is not supported, only rope and nope"
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
        mlps=[mlp_spec(architecture, fields)] * layers,
    )
    if hybrid and {*kinds} & {*STATE_LAYERS}:
        mamba = mamba_spec(fields, config)
        specs = (
            replace(layer, attention=mamba) if kind in STATE_LAYERS else layer
            for kind, layer in zip(kinds, config.layer_specs, strict=True)
        )
        config = replace(config, layer_specs=tuple(specs))
    return with_scales(config, fields)


def mamba_spec(fields: Fields, config: ModelConfig, inner: int | None = None) -> MambaSpec:
    """The state layers. `inner`: the numbers of all heads, if the file has them under a name of its own."""
    heads = fields.size("mamba_n_heads", default=128)
    expanded = fields.size("mamba_expand", default=2) * config.hidden_size
    inner = expanded if inner is None else inner
    if fields.raw("mamba_d_head") in (None, "auto"):
        fields = fields.within({}, {"mamba_d_head": max(1, inner // heads)})
    dim, groups = fields.size("mamba_d_head"), fields.size("mamba_n_groups", default=1)
    if heads * dim != inner:
        raise fields.error("mamba_d_head", f"{heads} heads of {dim} are not {inner} numbers")
    if heads % groups:
        raise fields.error("mamba_n_groups", f"{groups} groups do not divide {heads} heads")
    return MambaSpec(
        heads,
        dim,
        fields.size("mamba_d_state", default=256),
        groups,
        fields.size("mamba_d_conv", default=4),
        fields.get("mamba_conv_bias", True),
        fields.get("mamba_proj_bias", False),
        limits(fields, "time_step_limit"),
        config.eps,
    )


def limits(fields: Fields, name: str) -> tuple[float, float]:
    """The least and the largest step of a token. transformers writes {"__float__": "Infinity"}."""
    value = fields.raw(name)
    if value is None:
        return 0.0, inf
    if isinstance(value, list) and len(value) == 2:
        low, high = (inf if each == {"__float__": "Infinity"} else each for each in value)
        if isinstance(low, int | float) and isinstance(high, int | float) and 0 <= low < high:
            return float(low), float(high)
    raise fields.error(name, f"expected two numbers from 0 on, found {as_json(value)}")


def mlp_spec(architecture: str, fields: Fields) -> BlockSpec:
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
