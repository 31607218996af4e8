"""The shapes that adapters of a model have: in their files, and on the device."""

from dataclasses import replace

from personae.engine.checkpoints.base import EMBEDDING, OUTPUT
from personae.engine.models.decoder import Decoder
from personae.lora.shapes import LoraShapes


def lora_shapes(model: Decoder) -> LoraShapes:
    """The shapes that an adapter of this model must have."""
    config = model.whole
    embedding = model.fingerprints[EMBEDDING]
    copies = {"embedding": embedding, "output": model.fingerprints.get(OUTPUT, embedding)}
    return LoraShapes(
        config.layers,
        config.lora_sites,
        (config.vocab_size, config.hidden_size),
        config.tie,
        copies,
    )


def rank_shapes(model: Decoder) -> LoraShapes:
    """The shapes of this rank's part of an adapter."""
    return replace(lora_shapes(model), sites=model.config.lora_sites)
