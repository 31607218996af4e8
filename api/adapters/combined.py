"""`adapters` in a request: several adapters that answer together, each with a weight."""

import math
from collections.abc import Sequence

from msgspec.structs import replace

from personae.actors.client import ModelCard
from personae.errors import RequestError
from personae.lora.mix_id import mix_id

MAX_ADAPTERS = 8
MAX_WEIGHT = 16.0


def combined(base: ModelCard, parts: Sequence[tuple[ModelCard, float]], max_rank: int | None) -> ModelCard:
    """The card of the base with all of these adapters. Raises RequestError with the field that is wrong."""
    if base.adapter is not None:
        raise RequestError("With `adapters`, `model` must be the base model.", param="model")
    if len(parts) > MAX_ADAPTERS:
        raise RequestError(f"`adapters` may have at most {MAX_ADAPTERS}.", param="adapters")
    for index, (card, weight) in enumerate(parts):
        where = f"adapters[{index}]"
        if card.adapter is None:
            raise RequestError(f"`{card.name}` is not an adapter.", param=f"{where}.name")
        if card.traits:
            why = f"`{card.name}` is {', '.join(card.traits)} and cannot be combined with others."
            raise RequestError(why, param=f"{where}.name")
        if weight == 0 or not math.isfinite(weight) or abs(weight) > MAX_WEIGHT:
            raise RequestError(
                f"A weight is a number from -{MAX_WEIGHT:g} to {MAX_WEIGHT:g} other than 0.",
                param=f"{where}.weight",
                code="out_of_range",
            )
    digests = [(card.adapter or "", weight) for card, weight in parts]
    if len({digest for digest, _ in digests}) != len(digests):
        raise RequestError("An adapter appears twice in `adapters`.", param="adapters")
    rank = sum(card.rank or 0 for card, _ in parts)
    if max_rank is not None and rank > max_rank:
        raise RequestError(
            f"`adapters` have {rank} ranks together; the server has memory for {max_rank}.", param="adapters"
        )
    return replace(base, adapter=mix_id(digests), rank=rank)
