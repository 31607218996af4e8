"""Async tests with virtual time: when every task waits, the clock jumps to the next timer.

    from virtual_clock import virtual_clock

    pytestmark = virtual_clock      # for a module whose tests are all async

    async def test_a_deadline_an_hour_away_passes_at_once() -> None:
        started = anyio.current_time()
        await anyio.sleep(3600)
        assert anyio.current_time() - started >= 3600

Each test runs twice: on asyncio (the loop below) and on trio (`trio.testing.MockClock` with autojump).
`real_clock` runs tests on asyncio, uvloop and trio by the wall clock. Use it for tests in which another
thread works while the loop is idle: a jumping clock would see nothing to do. For a program rather than a test
function, as in property tests: `run_virtual(main, backend)`.

A deadlock (every task waits, no timer is set) is an error on asyncio instead of a test that hangs.
"""

import asyncio
import math
import selectors
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import pytest
import trio.testing
from patience import PATIENCE

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]  # the class depends on the platform
    """Never waits for a timeout: returns what is ready, else moves the clock to the end of the timeout."""

    now = 0.0
    timers: list[asyncio.TimerHandle]  # the loop's own, the earliest first

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # asyncio never asks for more than a day, also when nothing but a sleep without end is left. The clock
        # must not jump from day to day while a thread works.
        if timeout is None or (timeout > 0 and self.timers[0].when() == math.inf):
            ready: list[tuple[selectors.SelectorKey, int]] = super().select(PATIENCE)
            if not ready:  # no thread has woken it either
                raise RuntimeError("deadlock: every task waits and no timer is set")
            return ready
        ready = super().select(0)
        if not ready:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose `time()` starts at 0 and jumps."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._jumping.timers = self._scheduled
        # asyncio's is a nanosecond, which is lost when the clock shows months: timers would never be due.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._jumping.now


def virtual_backend(name: str) -> tuple[str, dict[str, object]]:
    """AnyIO's name and options of a backend (`asyncio` or `trio`) under a virtual clock."""
    if name == "asyncio":
        return name, {"loop_factory": VirtualLoop}
    return name, {"clock": trio.testing.MockClock(autojump_threshold=0)}


def run_virtual(main: Callable[[], Awaitable[T]], backend: str) -> T:
    """`anyio.run` under a virtual clock."""
    name, options = virtual_backend(backend)
    return anyio.run(main, backend=name, backend_options=options)


def _all_on(backends: dict[str, tuple[str, dict[str, object]]]) -> list[pytest.MarkDecorator]:
    return [
        pytest.mark.anyio,
        pytest.mark.parametrize("anyio_backend", list(backends.values()), ids=list(backends)),
    ]


virtual_clock = _all_on({name: virtual_backend(name) for name in ("asyncio", "trio")})
real_clock = _all_on(
    {"asyncio": ("asyncio", {}), "uvloop": ("asyncio", {"use_uvloop": True}), "trio": ("trio", {})}
)
