"""The shapes that adapters of a model have: in their files, and on the device."""

from dataclasses import replace

from personae.engine.checkpoints.base import EMBEDDING, OUTPUT
from personae.engine.models.decoder import Decoder
from personae.kernels.sgmv import RANK_PAGE
from personae.lora.shapes import LoraShapes
from personae.lora.weight_pools import pool_bytes


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
        config.unadaptable,
    )


def shared_shapes(model: Decoder) -> LoraShapes:
    """The shapes of this rank's part of an adapter, in the layers of all stages. If some ranks have attention
    and others MLPs, the shapes of one of each together."""
    comm, sites = model.comm, model.shared.lora_sites
    if 0 < (attention := comm.attention_ranks) < comm.size:
        other = attention if comm.rank < attention else 0
        of_other = model.whole.of_rank(other, comm.size, comm.expert_groups, attention_ranks=attention)
        sites = of_other.lora_sites | sites
    return replace(lora_shapes(model), sites=sites)


def pool_rows(model: Decoder, rows: int) -> int:
    """How many rank rows for each module the adapter pool of this rank has, if one with all shapes has so
    many. A rank without attention has as much memory for those of its MLPs, which experts share with all
    others."""
    if not 0 < model.comm.attention_ranks <= model.comm.rank:
        return rows
    memory = pool_bytes(shared_shapes(model), rows, model.dtype)
    return memory // pool_bytes(rank_shapes(model), RANK_PAGE, model.dtype) * RANK_PAGE


def rank_shapes(model: Decoder) -> LoraShapes:
    """The shapes of this rank's part of an adapter, in the layers of its stage, numbered from 0."""
    shapes = replace(lora_shapes(model), sites=model.shared.lora_sites)
    first, layers = model.config.first_layer, model.config.layers
    if model.comm.stages == 1:
        return shapes
    sites = {
        key: replace(site, layers=_within(site.layers, first, layers)) for key, site in shapes.sites.items()
    }
    return replace(shapes, layers=layers, sites=sites)


def _within(layers: frozenset[int] | None, first: int, count: int) -> frozenset[int] | None:
    return None if layers is None else frozenset(range(count)) & {layer - first for layer in layers}
