"""What a placement policy is asked, and what it may know."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from personae.actors.replicas.replica import Replica
from personae.actors.replicas.waiting import Group

OVERLOAD = 1.25  # times the mean load


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A group that is to go somewhere. `demand` is the work in tokens of all live requests for its adapter,
    this one's included. One that `returns` had a slot when its replica died: it waits for no room. `session`
    is the replica where its session was last."""

    group: Group
    demand: int
    returns: bool = False
    session: int | None = None

    def has_room(self, replica: Replica) -> bool:
        """Whether it may go there now."""
        return self.returns or replica.has_room(self.group.key)

    def roomy(self, replicas: Sequence[Replica]) -> list[Replica]:
        """Those where it may go now; of these those whose steps are as short as the client wants, if any
        are."""
        roomy = [replica for replica in replicas if self.has_room(replica)]
        targets = self.group.logs[0].targets
        if targets is None or targets.token is None:
            return roomy
        return [replica for replica in roomy if replica.step_seconds <= targets.token] or roomy


class Placement(Protocol):
    """Chooses among the replicas that serve. It waits for nothing. It may count what it chose: a group that
    it chooses a replica for goes there."""

    def choose(self, request: PlacementRequest, replicas: Sequence[Replica]) -> Replica | None:
        """Where the group goes; None to wait until one of them has room. There is at least one replica."""


def least(replicas: Sequence[Replica]) -> Replica:
    """The one with the least work."""
    return min(replicas, key=lambda replica: (replica.work, replica.index))


def not_overloaded(replicas: Sequence[Replica]) -> list[Replica]:
    """Those with no more than 1.25 times the mean work, or a step's worth of it."""
    mean = sum(replica.work for replica in replicas) / len(replicas)
    return [replica for replica in replicas if replica.work <= max(OVERLOAD * mean, replica.batch)] or [
        least(replicas)
    ]
