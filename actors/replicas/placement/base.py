"""What a placement policy is asked, and what it may know."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from personae.actors.replicas.replica import Replica
from personae.actors.replicas.waiting import Group

OVERLOAD = 1.25  # times the mean load


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A group that needs a replica. `demand` is the work, in tokens, of all live requests for its adapter,
    this one included. A group that `returns` had a slot when its replica died, so it does not wait for room.
    `session` is the replica that served its session last."""

    group: Group
    demand: int
    returns: bool = False
    session: int | None = None

    def has_room(self, replica: Replica) -> bool:
        """Whether the group may go to `replica` now."""
        return self.returns or replica.has_room(self.group.key)

    def roomy(self, replicas: Sequence[Replica]) -> list[Replica]:
        """The replicas where the group may go now. If it has a target for its time per token, only those that
        meet it, if any do."""
        roomy = [replica for replica in replicas if self.has_room(replica)]
        targets = self.group.logs[0].targets
        if targets is None or targets.token is None:
            return roomy
        return [replica for replica in roomy if replica.step_seconds <= targets.token] or roomy


class Placement(Protocol):
    """Chooses among the replicas that serve, without waiting. A group always goes to the replica that was
    chosen for it, so a policy may count its choices."""

    def choose(self, request: PlacementRequest, replicas: Sequence[Replica]) -> Replica | None:
        """Return the group's replica; None: wait until one has room. `replicas` is not empty."""


def least(replicas: Sequence[Replica]) -> Replica:
    """The replica with the least work."""
    return min(replicas, key=lambda replica: (replica.work, replica.index))


def not_overloaded(replicas: Sequence[Replica]) -> list[Replica]:
    """The replicas with at most 1.25 times the mean work, or at most one step's worth of work."""
    mean = sum(replica.work for replica in replicas) / len(replicas)
    return [replica for replica in replicas if replica.work <= max(OVERLOAD * mean, replica.batch)] or [
        least(replicas)
    ]
