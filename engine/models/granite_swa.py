"""Granite with windows and sinks, dense or with experts: most layers have a window, all have sinks, and each
may have a rotary base of its own."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.block import BlockSpec
from personae.engine.layers.moe import FusedExperts, MoeSpec
from personae.engine.layers.rotary import RopeConfig
from personae.engine.models.common import (
    decoder_config,
    rope_config,
    windows_by_type,
    with_attention,
    with_scales,
)
from personae.engine.models.granitemoe import mlp_spec
from personae.errors import as_json

FUSED = FusedExperts("experts.gate_up_proj", "experts.down_proj", suffix="")


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """The `config.json` of both."""
    layers, bias = fields.size("num_hidden_layers"), fields.get("attention_bias", False)
    windowed = [layer % 4 != 0 for layer in range(layers)]
    sparse = architecture == "GraniteMoeSWAForCausalLM"
    config = decoder_config(
        architecture,
        fields,
        windows=windows_by_type(fields, fields.size("sliding_window", default=128), windowed),
        ropes=_ropes(fields, layers),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.get("mlp_bias", False),
        default_eps=1e-6 if sparse else 1e-5,
        tie=not sparse,
        attention_scale=fields.number("attention_multiplier", default=1.0),
        mlps=[_experts(architecture, fields)] * layers if sparse else None,
    )
    return with_scales(with_attention(config, sinks=True), fields)


def _experts(architecture: str, fields: Fields) -> BlockSpec:
    spec = mlp_spec(architecture, fields)
    assert isinstance(spec, MoeSpec)
    return replace(spec, router="router", router_module=None, fused=FUSED)


def _ropes(fields: Fields, layers: int) -> tuple[RopeConfig | None, ...]:
    """The rotary embedding of each layer; a base of 0 means none."""
    rope, bases = rope_config(fields), fields.raw("layer_rope_theta")
    if bases is None:
        return (rope,) * layers
    known = isinstance(bases, list) and all(type(base) in (int, float) and base >= 0 for base in bases)
    if not known or len(bases) != layers:
        raise fields.error("layer_rope_theta", f"expected {layers} numbers from 0 on, found {as_json(bases)}")
    return tuple(replace(rope, theta=float(base)) if base else None for base in bases)
