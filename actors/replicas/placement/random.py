"""Chooses any replica, as a load balancer without knowledge does."""

import random
from collections.abc import Sequence

from personae.actors.replicas.placement.base import PlacementRequest
from personae.actors.replicas.replica import Replica


class RandomPlacement:
    """Every replica with room is equally likely."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)  # noqa: S311  nothing secret depends on it

    def choose(self, request: PlacementRequest, replicas: Sequence[Replica]) -> Replica | None:
        """A random replica with room."""
        roomy = request.roomy(replicas)
        return self._random.choice(roomy) if roomy else None
