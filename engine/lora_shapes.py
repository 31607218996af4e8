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


def shared_shapes(model: Decoder) -> LoraShapes:
    """The shapes of this rank's part of an adapter, in the layers of all stages."""
    return replace(lora_shapes(model), sites=model.shared.lora_sites)


def rank_shapes(model: Decoder) -> LoraShapes:
    """The shapes of this rank's part of an adapter, in the layers of its stage, numbered from 0."""
    shapes, first, layers = shared_shapes(model), model.config.first_layer, model.config.layers
    if model.comm.stages == 1:
        return shapes
    sites = {
        key: replace(site, layers=_within(site.layers, first, layers)) for key, site in shapes.sites.items()
    }
    return replace(shapes, layers=layers, sites=sites)


def _within(layers: frozenset[int] | None, first: int, count: int) -> frozenset[int] | None:
    return None if layers is None else frozenset(range(count)) & {layer - first for layer in layers}
