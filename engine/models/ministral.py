"""Ministral 8B: Mistral with a window in some of the layers, which `layer_types` names."""

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.models.common import decoder_config, windows_by_type


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Ministral's `config.json`."""
    windowed = [True] * fields.size("num_hidden_layers")
    window = fields.size("sliding_window", default=4096) if _has_window(fields) else None
    return decoder_config(architecture, fields, windows=windows_by_type(fields, window, windowed))


def _has_window(fields: Fields) -> bool:
    return "sliding_window" in fields or not fields.given("sliding_window")
