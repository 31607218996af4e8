"""Waits for other threads and processes, by the wall clock and with a limit.

`PATIENCE` is long enough for a busy machine that is many times slower than this one. A test that waits this
long has found a fault.
"""

import time
from collections.abc import Callable

import anyio

PATIENCE = 120.0  # seconds


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait until it holds, in a test that has a thread of its own."""
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, f"not within {PATIENCE:g} s: {what}"
        time.sleep(0.005)


async def soon(condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
    """The same in a test whose loop has to run meanwhile. It also works under a virtual clock, which stands
    still meanwhile if nothing else has a timer."""
    until = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < until, f"not within {patience:g} s: {what}"
        await anyio.to_thread.run_sync(time.sleep, 0.001)
