"""Seed-OSS: Llama with biases on q, k and v."""

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.models.common import decoder_config, uniform_windows


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Seed-OSS' `config.json`."""
    return decoder_config(
        architecture,
        fields,
        windows=uniform_windows(fields, None),
        head_dim=128,
        qkv_bias=fields.get("attention_bias", True),
        o_bias=fields.get("attention_out_bias", False),
        mlp_bias=fields.get("mlp_bias", False),
    )
