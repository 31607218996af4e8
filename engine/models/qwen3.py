"""Qwen3: an RMS norm over each head of q and k, and a head size of its own (128 by default)."""

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.models.common import decoder_config, mixed_windows


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Qwen3's `config.json`; `attention_bias` covers q, k, v and o."""
    bias = fields.get("attention_bias", False)
    return decoder_config(
        architecture,
        fields,
        windows=mixed_windows(fields),
        head_dim=128,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
    )
