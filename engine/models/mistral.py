"""Mistral: Llama with a sliding window in every layer, unless `sliding_window` is null. Also the decoder of
Mistral 3, a model that reads images."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.models import deepseek, ministral3
from personae.engine.models.common import decoder_config, text_fields, uniform_windows


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Mistral's `config.json`. The decoder of a model that reads images may be Ministral 3's or
    Mistral 4's."""
    text = fields.section("text_config")
    if text is not None and text.raw("model_type") == "ministral3":
        return ministral3.translate(architecture, fields)
    if text is not None and text.raw("model_type") == "mistral4":
        return replace(deepseek.mistral4(architecture, text_fields(fields, "mistral4")), images=True)
    images, fields = "text_config" in fields, text_fields(fields, "mistral")
    window = None  # only a null says so; transformers' default is a window
    if "sliding_window" in fields or not fields.given("sliding_window"):
        window = fields.size("sliding_window", default=4096)
    return decoder_config(architecture, fields, windows=uniform_windows(fields, window), images=images)
