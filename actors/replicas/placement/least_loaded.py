"""Chooses the replica with the least work."""

from collections.abc import Sequence

from personae.actors.replicas.placement.base import PlacementRequest, least
from personae.actors.replicas.replica import Replica


class LeastLoaded:
    """The replica with the least promised work, whatever it has cached."""

    def choose(self, request: PlacementRequest, replicas: Sequence[Replica]) -> Replica | None:
        """The replica with the least work among those with room."""
        roomy = request.roomy(replicas)
        return least(roomy) if roomy else None
