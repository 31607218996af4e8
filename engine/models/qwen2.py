"""Qwen2 and Qwen2.5: biases on q, k and v, and a sliding window in the upper layers if it is enabled."""

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.models.common import decoder_config, mixed_windows


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Qwen2's `config.json`."""
    return decoder_config(architecture, fields, windows=mixed_windows(fields), qkv_bias=True)
