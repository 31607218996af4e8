"""Gemma 1: Llama with GELU, norms whose stored weights lack 1, and a scale on the embedding."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.models.common import activation, decoder_config, uniform_windows


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Gemma's `config.json`. `hidden_activation`, which some files have, comes before `hidden_act`."""
    name = "hidden_activation" if "hidden_activation" in fields else "hidden_act"
    gate = activation(fields, name, "gelu_pytorch_tanh")
    fields.raw("hidden_act")
    bias = fields.get("attention_bias", False)
    config = decoder_config(
        architecture,
        fields,
        windows=uniform_windows(fields, None),
        head_dim=256,
        qkv_bias=bias,
        o_bias=bias,
        gate=gate,
        tie=True,
    )
    return replace(config, norm_offset=1.0, embedding_scale=config.hidden_size**0.5)
