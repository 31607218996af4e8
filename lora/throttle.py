"""The pace of work that no token waits for: receiving or reading an adapter takes a core while it lasts.

The threads of a step wait for each other, so one that loses its core to such work holds up all of them. It
rests therefore three times as long as it has worked. Threads of lower priority, the obvious way, hold up more
than they spare: one that the system puts aside for long while it has the interpreter's lock keeps everybody
from it. On a busy machine the event loop stood still for two seconds behind the JSON of a header.
"""

from collections.abc import Callable
from time import sleep, thread_time

Rest = Callable[[], object]

_SHORTEST = 0.001  # seconds of work that are worth a rest
_RESTS = 3  # seconds of rest for one of work


def no_rest() -> None:
    """For work that somebody waits for."""


class Throttle:
    """Made and used by the thread that works."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Work is counted from now on."""
        self._since = thread_time()

    @property
    def due(self) -> float:
        """Seconds of rest that are due: three times as long as this thread has had a processor since the last
        one, 0 while that is short."""
        worked = thread_time() - self._since
        return _RESTS * worked if worked >= _SHORTEST else 0.0

    def rest(self) -> None:
        """Sleep as long as is due."""
        if due := self.due:
            sleep(due)
            self.begin()
