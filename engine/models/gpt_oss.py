"""gpt-oss: experts with biases and a clamped activation, attention sinks, and a window in every second
layer."""

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.moe import FusedExperts, MoeSpec
from personae.engine.models.common import decoder_config, experts, windows_by_type, with_attention
from personae.kernels.moe import Routing
from personae.kernels.reference import SWIGLU_ALPHA, SWIGLU_LIMIT

MEANINGLESS = ("experts_per_token", "initial_context_length", "hidden_act")
"""The makers' other names for the same, and an activation that the experts do not have."""


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """gpt-oss' `config.json`. `attention_bias` covers q, k, v and o."""
    if "rope_parameters" not in fields and "rope_scaling" not in fields:
        raise fields.error("rope_parameters", "is missing")
    for name, served in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if fields.number(name, default=served) != served:
            raise fields.error(name, f"only {served:g} is supported")
    for name in MEANINGLESS:
        fields.raw(name)
    bias, layers = fields.get("attention_bias", True), fields.size("num_hidden_layers")
    windowed = [layer % 2 == 0 for layer in range(layers)]
    count, top_k = experts(fields)
    moe = MoeSpec(
        count,
        fields.size("intermediate_size"),
        Routing(top_k, renormalize=True),
        activation="silu_clamped",
        router="router",
        bias=True,
        fused=FusedExperts(
            "experts.gate_up_proj", "experts.down_proj", suffix="", transposed=True, alternate=True
        ),
    )
    config = decoder_config(
        architecture,
        fields,
        windows=windows_by_type(fields, fields.size("sliding_window", default=128), windowed),
        head_dim=64,
        qkv_bias=bias,
        o_bias=bias,
        mlps=[moe] * layers,
        default_eps=1e-5,
        default_theta=150000.0,
    )
    return with_attention(config, sinks=True)
