"""Where the processes of replicas run: on this machine, or where another `ReplicaSource` puts them."""

from collections.abc import Sequence
from typing import Protocol

from personae.actors.process import Launch
from personae.errors import Conflict


class ReplicaSource(Protocol):
    """Gives each replica a place to run. A replica's number is never used again."""

    @property
    def most(self) -> int:
        """How many replicas may have a place at once."""

    def acquire(self, replica: int) -> Launch:
        """Give a replica a place. The returned `Launch` starts its process there, each time that it has to be
        started. Raises Conflict if no place is free."""

    def release(self, replica: int) -> None:
        """Free the place of a replica whose process has ended."""


class LocalSource:
    """A fixed number of places. `launches` has, for each place, how to start a process there."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        self._launches = launches
        self._place_of: dict[int, int] = {}

    @property
    def most(self) -> int:
        """How many places there are."""
        return len(self._launches)

    def acquire(self, replica: int) -> Launch:
        """Take the first free place."""
        taken = self._place_of.values()
        place = next((place for place in range(self.most) if place not in taken), None)
        if place is None:
            raise Conflict(f"All {self.most} engines are in use; try again when one has drained.")
        self._place_of[replica] = place
        return self._launches[place]

    def release(self, replica: int) -> None:
        """Free the replica's place."""
        del self._place_of[replica]
