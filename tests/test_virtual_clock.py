import time

import anyio
import anyio.to_thread
import pytest
from virtual_clock import virtual_clock

pytestmark = virtual_clock


async def test_an_hour_of_sleep_passes_at_once() -> None:
    wall, started = time.monotonic(), anyio.current_time()
    await anyio.sleep(3600)
    assert anyio.current_time() - started == pytest.approx(3600)
    assert time.monotonic() - wall < 60


async def test_timers_fire_in_the_order_of_their_times() -> None:
    order: list[float] = []

    async def note(delay: float) -> None:
        await anyio.sleep(delay)
        order.append(delay)

    async with anyio.create_task_group() as tasks:
        for delay in (30.0, 10.0, 20.0):
            tasks.start_soon(note, delay)
    assert order == [10.0, 20.0, 30.0]


async def test_a_deadline_in_the_future_is_met() -> None:
    with pytest.raises(TimeoutError), anyio.fail_after(100):
        await anyio.sleep_forever()


async def test_the_clock_stands_still_while_a_thread_works_and_only_a_sleep_without_end_waits() -> None:
    started = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.sleep_forever)
        await anyio.to_thread.run_sync(time.sleep, 0.05)
        tasks.cancel_scope.cancel()
    assert anyio.current_time() == started


async def test_timers_are_due_after_years_too() -> None:
    for _ in range(3):
        await anyio.sleep(40_000_000.3)  # noqa: ASYNC116  # it ends, and that is what is tested
        started = anyio.current_time()
        await anyio.sleep(0.001)
        assert anyio.current_time() - started == pytest.approx(0.001, rel=1e-3)
