"""Chooses the replica where the first token is estimated to come soonest.

The estimate has two parts: the prompt's uncached tokens at the measured time per token, and the wait until
they are computed. The wait is the longer of two: the prompts promised before, and loading the adapter from
where it is. A prompt also delays the requests behind it, so the more of them wait, the more cached tokens
count. Candidates are the replicas that have the adapter, and the first few in an order that follows from its
digest (rendezvous hashing). So each adapter has a home replica, and more of them as its load grows. No
candidate has more than 1.25 times the mean load.
"""

from collections.abc import Sequence
from functools import lru_cache
from zlib import crc32

from personae.actors.replicas.placement.base import PlacementRequest, not_overloaded
from personae.actors.replicas.replica import Replica


class EstimatedSeconds:
    """The default policy."""

    def choose(self, request: PlacementRequest, replicas: Sequence[Replica]) -> Replica | None:
        """The candidate with the lowest estimate among those with room."""
        if (home := self._session_replica(request, replicas)) is not None:
            return home
        roomy = request.roomy(self._candidates(request, replicas))
        if not roomy:
            return None
        behind = sum(replica.waiting for replica in replicas) / len(replicas)
        return min(roomy, key=lambda replica: self.seconds(request, replica, behind))

    def seconds(self, request: PlacementRequest, replica: Replica, behind: float) -> float:
        """The time until the first token at this replica, and the delay that its prompt causes to the
        `behind` requests."""
        group = request.group
        own = replica.uncached(group) * replica.token_seconds
        return replica.first_token_seconds(group) + own * behind

    def _session_replica(self, request: PlacementRequest, replicas: Sequence[Replica]) -> Replica | None:
        """The replica of the request's session, if it has room and is not overloaded."""
        if request.session is None:
            return None
        fit = request.roomy(not_overloaded(replicas))
        return next((replica for replica in fit if replica.index == request.session), None)

    def _candidates(self, request: PlacementRequest, replicas: Sequence[Replica]) -> Sequence[Replica]:
        """The candidates, the most preferred first."""
        fit = not_overloaded(replicas)
        adapter = request.group.key.adapter
        if adapter is None:
            return fit
        mean = max(sum(replica.work for replica in replicas) / len(replicas), replicas[0].batch)
        homes = 1 + int(request.demand / mean)
        order = _order(adapter, tuple(replica.index for replica in replicas))
        rank = {index: place for place, index in enumerate(order)}
        ranked = sorted(fit, key=lambda replica: rank[replica.index])
        return ranked[:homes] + [each for each in ranked[homes:] if each.load_seconds(adapter) == 0.0]


@lru_cache(maxsize=16_384)
def _order(adapter: str, replicas: tuple[int, ...]) -> tuple[int, ...]:
    """The replicas in an adapter's own order of preference, which never changes."""
    return tuple(sorted(replicas, key=lambda index: crc32(f"{adapter} {index}".encode())))
