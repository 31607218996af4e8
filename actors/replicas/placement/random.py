"""Anywhere: what a balancer that knows nothing does."""

import random
from collections.abc import Sequence

from personae.actors.replicas.placement.base import PlacementRequest
from personae.actors.replicas.replica import Replica


class RandomPlacement:
    """Each replica with room is as likely."""

    def __init__(self, seed: int = 0) -> None:
        self._dice = random.Random(seed)  # noqa: S311  nothing secret depends on it

    def choose(self, request: PlacementRequest, replicas: Sequence[Replica]) -> Replica | None:
        """One by lot."""
        roomy = request.roomy(replicas)
        return self._dice.choice(roomy) if roomy else None
