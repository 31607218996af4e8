"""Falcon-H1: each layer has attention and Mamba-2 in parallel. Files have scales for nearly every part."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.layers.attention import AttentionSpec
from personae.engine.layers.block import LayerSpec
from personae.engine.layers.mamba import MambaSpec
from personae.engine.layers.mlp import MlpSpec
from personae.engine.layers.parallel import ParallelSpec
from personae.engine.models.common import activation, decoder_config, uniform_windows
from personae.engine.models.granitemoe import mamba_spec
from personae.errors import as_json


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Falcon-H1's `config.json`."""
    layers = fields.size("num_hidden_layers")
    for name in ("layers_block_type", "layer_types"):
        kinds = fields.raw(name)
        if kinds is not None and (not isinstance(kinds, list) or kinds != ["hybrid"] * layers):
            raise fields.error(name, f"expected {layers} times hybrid, found {as_json(kinds)}")
    fields.raw("mamba_chunk_size"), fields.raw("num_logits_to_keep")
    activation(fields)  # of the convolution too
    bias = fields.get("attention_bias", False)
    gate, down = _numbers(fields, "mlp_multipliers", 2)
    config = decoder_config(
        architecture,
        fields,
        windows=uniform_windows(fields.within({}, {"layer_types": None}), None),
        qkv_bias=bias,
        o_bias=bias,
        mlps=[
            MlpSpec(
                fields.size("intermediate_size"),
                activation(fields),
                fields.get("mlp_bias", False),
                path="feed_forward",
                scales=(gate, down),
            )
        ]
        * layers,
        default_eps=1e-5,
    )
    mamba = _mamba(fields, config)

    def scales(place: str) -> tuple[float, float]:
        name = f"{place}_multiplier"
        return fields.number(f"attention_{name}", default=1.0), fields.number(f"ssm_{name}", default=1.0)

    inputs, outputs = scales("in"), scales("out")
    scale = fields.number("key_multiplier", default=1.0)

    def change(layer: LayerSpec) -> LayerSpec:
        attention = layer.attention
        assert isinstance(attention, AttentionSpec)
        attention = replace(attention, scale=scale * attention.head_dim**-0.5)  # so keys are scaled, too
        return replace(layer, attention=ParallelSpec(attention, mamba, inputs, outputs))

    return replace(
        config.with_layers(change),
        pre_norms=("input_layernorm", "pre_ff_layernorm"),
        final_norm="model.final_layernorm",
        embedding_scale=fields.number("embedding_multiplier", default=1.0),
        logits_scale=fields.number("lm_head_multiplier", default=1.0),
    )


def _mamba(fields: Fields, config: ModelConfig) -> MambaSpec:
    inner = None
    if "mamba_d_ssm" in fields or not fields.given("mamba_d_ssm"):
        inner = fields.size("mamba_d_ssm", default=1024)
    spec = mamba_spec(fields, config, inner)
    if fields.get("projectors_bias", False) != spec.bias:
        raise fields.error("projectors_bias", "is not supported without mamba_proj_bias, nor the other way")
    normed, before_gate = fields.get("mamba_rms_norm", False), fields.get("mamba_norm_before_gate", True)
    return replace(
        spec,
        norm=None if not normed else "before_gate" if before_gate else "after_gate",
        scales=_numbers(fields, "ssm_multipliers", 5),
    )


def _numbers(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    """A list of so many numbers; ones if the file has none."""
    value = fields.raw(name)
    if value is None:
        return (1.0,) * count
    if isinstance(value, list) and len(value) == count and all(type(each) in (int, float) for each in value):
        return tuple(map(float, value))
    raise fields.error(name, f"expected {count} numbers, found {as_json(value)}")
