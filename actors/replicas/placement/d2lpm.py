"""Chooses the replica with the longest cached prefix, unless the tenant has had too much computed there.

This is double deficit longest prefix match: D2LPM of Cao et al., "Locality-aware Fair Scheduling in LLM
Serving". The virtual token counters decide which tenant goes next, over all replicas. A second count, per
(tenant, replica), decides where. A tenant has a deficit at each replica, and the tokens computed for it there
are subtracted. A request goes to the replica with the longest prefix among those where the deficit is not
used up. When it is used up at all replicas with room, each of them gets another quantum. So a tenant whose
requests could all go to one replica is spread over all of them, at most a quantum apart, and its requests
stay together within a quantum.
"""

from collections import OrderedDict
from collections.abc import Sequence

from personae.actors.replicas.placement.base import PlacementRequest, not_overloaded
from personae.actors.replicas.replica import Replica

QUANTUM = 4096.0  # tokens
TENANTS = 4096  # whose deficits are remembered, the latest ones


class DoubleDeficit:
    """The policy keeps the deficits: `choose` counts what it places."""

    def __init__(self, quantum: float = QUANTUM, most: int = TENANTS) -> None:
        self._quantum = quantum
        self._most = most
        self._deficits: OrderedDict[str, dict[int, float]] = OrderedDict()

    def choose(self, request: PlacementRequest, replicas: Sequence[Replica]) -> Replica | None:
        """The replica with the fewest tokens to compute, among those where the tenant's deficit is not used
        up."""
        roomy = request.roomy(not_overloaded(replicas))
        if not roomy:
            return None
        group = request.group
        deficits = self._deficits_of(group.key.tenant, replicas)
        while not (eligible := [replica for replica in roomy if deficits[replica.index] > 0]):
            for replica in roomy:
                deficits[replica.index] += self._quantum
        chosen = min(eligible, key=lambda replica: (replica.uncached(group), replica.work, replica.index))
        deficits[chosen.index] -= chosen.uncached(group) + group.answer * len(group.logs)
        return chosen

    def deficit(self, tenant: str, replica: int) -> float:
        """How many tokens a replica may still compute for a tenant before others are preferred."""
        return self._deficits.get(tenant, {}).get(replica, self._quantum)

    def _deficits_of(self, tenant: str, replicas: Sequence[Replica]) -> dict[int, float]:
        """A tenant's deficits at the current replicas."""
        known = self._deficits.get(tenant, {})
        found = {replica.index: known.get(replica.index, self._quantum) for replica in replicas}
        self._deficits[tenant] = found
        self._deficits.move_to_end(tenant)
        if len(self._deficits) > self._most:
            self._deficits.popitem(last=False)
        return found
