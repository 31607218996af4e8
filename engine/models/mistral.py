"""Mistral: Llama with a sliding window in every layer, where `sliding_window` is not null."""

from personae.engine.config import Fields, ModelConfig
from personae.engine.models.common import decoder_config, uniform_windows


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Mistral's `config.json`."""
    window = fields.size("sliding_window") if "sliding_window" in fields else None
    return decoder_config(architecture, fields, windows=uniform_windows(fields, window))
