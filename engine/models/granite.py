"""Granite 3: Llama with scales on the embedding, the residual stream, the scores and the logits."""

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.models import llama
from personae.engine.models.common import with_scales


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Granite's `config.json`."""
    scale = fields.number("attention_multiplier", default=1.0)
    return with_scales(llama.translate(architecture, fields, attention_scale=scale), fields)
