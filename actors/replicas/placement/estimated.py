"""Where the first token is estimated to come soonest.

The seconds are those of the prompt's uncached tokens, at the measured time a token, and those until its turn
comes: of the prompts promised before, or of loading the adapter, by where it is, if that takes longer. What a
prompt costs those that come behind it counts, too: when many wait, it matters more that little is computed
twice. Candidates are those that have the adapter, and the first few replicas in an order that follows from
its digest (rendezvous hashing): so an adapter has its home, and as many more as its load asks for. None of
them has more than 1.25 times the mean load.
"""

from collections.abc import Sequence
from functools import lru_cache
from zlib import crc32

from personae.actors.replicas.placement.base import PlacementRequest, not_overloaded
from personae.actors.replicas.replica import Replica


class EstimatedSeconds:
    """The default policy."""

    def choose(self, request: PlacementRequest, replicas: Sequence[Replica]) -> Replica | None:
        """The candidate with the least estimated time, if one has room."""
        if (home := self._home(request, replicas)) is not None:
            return home
        roomy = request.roomy(self._candidates(request, replicas))
        if not roomy:
            return None
        behind = sum(replica.waiting for replica in replicas) / len(replicas)
        return min(roomy, key=lambda replica: self.seconds(request, replica, behind))

    def seconds(self, request: PlacementRequest, replica: Replica, behind: float) -> float:
        """Until the first token, if the request goes there, and what its prompt costs those `behind` it."""
        group = request.group
        own = replica.uncached(group) * replica.token_seconds
        return replica.first_token_seconds(group) + own * behind

    def _home(self, request: PlacementRequest, replicas: Sequence[Replica]) -> Replica | None:
        """The replica of its session, if that is not overloaded and has room."""
        if request.session is None:
            return None
        fit = request.roomy(not_overloaded(replicas))
        return next((replica for replica in fit if replica.index == request.session), None)

    def _candidates(self, request: PlacementRequest, replicas: Sequence[Replica]) -> Sequence[Replica]:
        """In the order of their preference."""
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
    """The replicas by how well they suit an adapter: always the same, another for each adapter."""
    return tuple(sorted(replicas, key=lambda index: crc32(f"{adapter} {index}".encode())))
