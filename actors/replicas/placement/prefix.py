"""Chooses the replica that has cached most of the prompt."""

from collections.abc import Sequence

from personae.actors.replicas.placement.base import PlacementRequest, not_overloaded
from personae.actors.replicas.replica import Replica


class LongestPrefix:
    """The replica with the longest cached prefix that is not overloaded; of equals the least loaded."""

    def choose(self, request: PlacementRequest, replicas: Sequence[Replica]) -> Replica | None:
        """The replica with the fewest tokens to compute."""
        roomy = request.roomy(not_overloaded(replicas))
        if not roomy:
            return None
        return min(roomy, key=lambda replica: (replica.uncached(request.group), replica.work, replica.index))
