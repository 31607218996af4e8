"""Where the least work is."""

from collections.abc import Sequence

from personae.actors.replicas.placement.base import PlacementRequest, least
from personae.actors.replicas.replica import Replica


class LeastLoaded:
    """The replica with the least work promised, whatever it has at hand."""

    def choose(self, request: PlacementRequest, replicas: Sequence[Replica]) -> Replica | None:
        """The one with the least work that has room."""
        roomy = request.roomy(replicas)
        return least(roomy) if roomy else None
