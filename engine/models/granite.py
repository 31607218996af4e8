"""Granite 3: Llama with scales on the embedding, the residual stream, the scores and the logits."""

from dataclasses import replace

from personae.engine.config import ModelConfig
from personae.engine.fields import Fields
from personae.engine.models import llama


def translate(architecture: str, fields: Fields) -> ModelConfig:
    """Granite's `config.json`."""
    return replace(
        llama.translate(
            architecture, fields, attention_scale=fields.number("attention_multiplier", default=1.0)
        ),
        embedding_scale=fields.number("embedding_multiplier", default=1.0),
        residual_scale=fields.number("residual_multiplier", default=1.0),
        logits_scale=1 / fields.number("logits_scaling", default=1.0),
    )
