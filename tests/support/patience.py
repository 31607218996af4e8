"""Waiting for what other threads and processes do, by the wall clock and with an end.

`PATIENCE` is long enough for a busy machine that is many times slower than this one: whoever has to wait for
all of it has found a fault.
"""

import time
from collections.abc import Callable

import anyio

PATIENCE = 120.0  # seconds


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait until it holds, in a test that has a thread to itself."""
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, f"not within {PATIENCE:g} s: {what}"
        time.sleep(0.005)


async def soon(condition: Callable[[], bool], what: str) -> None:
    """The same in a test of which the loop has to run meanwhile. Also under a virtual clock, which stands
    still meanwhile if nobody else has a timer."""
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, f"not within {PATIENCE:g} s: {what}"
        await anyio.to_thread.run_sync(time.sleep, 0.001)
