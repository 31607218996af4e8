"""Where most of the prompt is computed already, as long as the tenant has not had too much there.

Double deficit longest prefix match: D2LPM of Cao et al., "Locality-aware Fair Scheduling in LLM Serving". The
virtual token counters say which tenant goes next, over all replicas; a second count, for each (tenant,
replica), says where. A tenant has a deficit at each replica: what is computed for it there is taken from it,
and it goes where its prefix is longest among the replicas at which its deficit is not spent. When it is spent
at all that have room, each of these gets a quantum more. So a tenant that could have all its requests at one
replica is spread over all of them, a quantum apart, and its locality holds within a quantum.
"""

from collections import OrderedDict
from collections.abc import Sequence

from personae.actors.replicas.placement.base import PlacementRequest, not_overloaded
from personae.actors.replicas.replica import Replica

QUANTUM = 4096.0  # tokens
TENANTS = 4096  # whose deficits are remembered, the latest


class DoubleDeficit:
    """It keeps the deficits: `choose` counts what it places."""

    def __init__(self, quantum: float = QUANTUM, most: int = TENANTS) -> None:
        self._quantum = quantum
        self._most = most
        self._deficits: OrderedDict[str, dict[int, float]] = OrderedDict()

    def choose(self, request: PlacementRequest, replicas: Sequence[Replica]) -> Replica | None:
        """The replica with the fewest tokens to compute, of those where the tenant's deficit is not spent."""
        roomy = request.roomy(not_overloaded(replicas))
        if not roomy:
            return None
        group = request.group
        deficits = self._of(group.key.tenant, replicas)
        while not (open_ := [replica for replica in roomy if deficits[replica.index] > 0]):
            for replica in roomy:
                deficits[replica.index] += self._quantum
        chosen = min(open_, key=lambda replica: (replica.uncached(group), replica.work, replica.index))
        deficits[chosen.index] -= chosen.uncached(group) + group.answer * len(group.logs)
        return chosen

    def deficit(self, tenant: str, replica: int) -> float:
        """How many tokens a tenant may still have computed at a replica before others are preferred."""
        return self._deficits.get(tenant, {}).get(replica, self._quantum)

    def _of(self, tenant: str, replicas: Sequence[Replica]) -> dict[int, float]:
        """A tenant's deficits at the replicas that there are."""
        known = self._deficits.get(tenant, {})
        found = {replica.index: known.get(replica.index, self._quantum) for replica in replicas}
        self._deficits[tenant] = found
        self._deficits.move_to_end(tenant)
        if len(self._deficits) > self._most:
            self._deficits.popitem(last=False)
        return found
