"""Threads for work that no token waits for: where the system lets them, they step back for others.

Reading and checking an adapter takes a core for as long as it lasts. The threads of a step wait for each
other, so one that loses its core to such work holds up all of them.
"""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Args = TypeVarTuple("Args")

_NICENESS = 10  # steps behind the others: a tenth of their share of a core that both want, so it goes on


class QuietThreads:
    """At most `count` of them, started when they are needed; they end with this object.

    Threads of a shared pool would not do: who has stepped back may not step forward again.
    """

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, "quiet", initializer=_step_back)

    def call(self, function: Callable[[*Args], T], *args: *Args) -> T:
        """`function(*args)` on one of them; waits for it."""
        return self._pool.submit(function, *args).result()


def _step_back() -> None:
    if sys.platform == "linux":  # where a thread has a priority of its own
        thread = threading.get_native_id()
        with suppress(OSError):  # some containers forbid it: then it is a thread like any other
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)
