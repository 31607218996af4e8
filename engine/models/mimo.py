"""MiMo-7B: Qwen2 with a layer that predicts the token after the next one. Only speculation uses it."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.models import qwen2


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """MiMo's `config.json`: Qwen2's, and the number of layers for further tokens."""
    layers = fields.size("num_nextn_predict_layers", default=0, zero=True)
    return replace(qwen2.translate(architecture, fields), mtp_layers=layers)
