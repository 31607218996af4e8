"""Granite 3: Llama with scales on the embedding, the residual stream, the scores and the logits."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.models import llama
from personae.engine.models.common import scales


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Granite's `config.json`."""
    return replace(
        llama.translate(
            architecture, fields, attention_scale=fields.number("attention_multiplier", default=1.0)
        ),
        **scales(fields),
    )
