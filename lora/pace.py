"""The pace of work that no token waits for: reading an adapter takes a core for as long as it lasts.

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


class Pace:
    """Made and used by the thread that works."""

    def __init__(self) -> None:
        self._since = thread_time()

    def rest(self) -> None:
        """Sleep three times as long as this thread has had a processor since the last rest, unless that
        was short."""
        worked = thread_time() - self._since
        if worked >= _SHORTEST:
            sleep(_RESTS * worked)
            self._since = thread_time()
