"""What a stream sleeps on between two tokens."""

import anyio
import pytest
from anyio.lowlevel import checkpoint
from virtual_clock import virtual_clock

from personae.actors.kit.signal import Signal

pytestmark = virtual_clock


async def test_a_task_is_woken_each_time_that_it_waits() -> None:
    signal, got = Signal(), list[int]()
    waiting: list[int] = []

    async def wait() -> None:
        for _ in range(3):
            while not waiting:
                await signal.wait()
            got.append(waiting.pop())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        for number in range(3):
            await anyio.sleep(1)
            waiting.append(number)
            signal.set()
            signal.set()  # again, before the task runs
            await anyio.sleep(1)
            assert got == list(range(number + 1))


async def test_a_signal_that_nobody_waits_for_is_forgotten() -> None:
    signal = Signal()
    signal.set()
    with anyio.move_on_after(1) as scope:
        await signal.wait()
    assert scope.cancelled_caught


async def test_a_wait_that_is_cancelled_leaves_the_signal_usable() -> None:
    signal = Signal()
    with anyio.move_on_after(1) as scope:
        await signal.wait()
    assert scope.cancelled_caught
    signal.set()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(signal.wait)
        await anyio.sleep(1)
        signal.set()


async def test_a_scope_that_was_cancelled_before_the_wait_ends_it() -> None:
    signal = Signal()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await signal.wait()
        pytest.fail("it should not have gone on")
    await checkpoint()
    assert scope.cancelled_caught
