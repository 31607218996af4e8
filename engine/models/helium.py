"""Helium: Llama with an interleaved rotary embedding."""

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.models.common import decoder_config, uniform_windows


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Helium's `config.json`. `attention_bias` covers q, k and v."""
    return decoder_config(
        architecture,
        fields,
        windows=uniform_windows(fields, None),
        head_dim=128,
        qkv_bias=fields.get("attention_bias", False),
        mlp_bias=fields.get("mlp_bias", False),
        default_eps=1e-8,
        default_theta=100000.0,
        interleaved=True,
    )
