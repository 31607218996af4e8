"""Throttles background work, such as receiving or reading an adapter, which takes a core while it runs.

The threads of a step wait for each other, so if one loses its core to such work, all of them wait. Therefore
the work rests three times as long as it runs. Threads of lower priority would do more harm than good: if the
system suspends one for long while it holds the GIL, all other threads wait for it. On a busy machine the
event loop once stood still for two seconds while the JSON of a header was parsed.
"""

from collections.abc import Callable
from time import sleep, thread_time

Rest = Callable[[], object]

_SHORTEST = 0.001  # fewest seconds of work that are worth a rest
_RESTS = 3  # seconds of rest per second of work


def no_rest() -> None:
    """For work that a request waits for."""


class Throttle:
    """The thread that does the work makes and uses it."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start to count work now."""
        self._since = thread_time()

    @property
    def due(self) -> float:
        """The seconds of rest that are due: three times this thread's processor time since the last rest; 0
        while that is short."""
        worked = thread_time() - self._since
        return _RESTS * worked if worked >= _SHORTEST else 0.0

    def rest(self) -> None:
        """Sleep for as long as is due."""
        if due := self.due:
            sleep(due)
            self.begin()
