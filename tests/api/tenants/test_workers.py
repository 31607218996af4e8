"""Whose turn it is at work off the event loop."""

import threading
import time

import anyio
import pytest
from patience import PATIENCE, soon
from virtual_clock import virtual_clock

from personae.api.tenants import workers as module
from personae.api.tenants.workers import Workers

pytestmark = virtual_clock


async def test_a_tenants_work_is_done_one_after_the_other_and_anothers_meanwhile() -> None:
    workers, running, most = Workers(threads=2), 0, 0
    lock, may = threading.Lock(), threading.Event()
    others: list[str] = []

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        assert may.wait(PATIENCE)
        with lock:
            running -= 1

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(workers.run, "loud", work)
        await soon(lambda: running == 1, "the first is at work")
        await workers.run("quiet", lambda: others.append("done"))
        assert others == ["done"]
        may.set()
    assert most == 1


async def test_what_fails_gives_its_turn_back() -> None:
    workers = Workers()

    def fail() -> None:
        raise ValueError("planted")

    for _ in range(3):
        with pytest.raises(ValueError, match="planted"):
            await workers.run("ann", fail)
    assert await workers.run("ann", lambda: 5) == 5


async def test_who_stops_waiting_loses_its_place_and_no_other() -> None:
    workers, done = Workers(), []
    turn = await workers.turn("ann")
    async with anyio.create_task_group() as tasks:
        with anyio.move_on_after(1):
            await workers.turn("ann")
        tasks.start_soon(workers.run, "ann", lambda: done.append(1))
        await anyio.sleep(1)
        assert done == []
        turn.end()
        turn.end()
    assert done == [1]


async def test_a_tenant_rests_as_long_as_its_work_took(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([10.0, 10.5, 20.0, 20.0])
    monkeypatch.setattr(module.time, "thread_time", lambda: next(seconds))
    workers = Workers()
    await workers.run("ann", lambda: None)
    begun = anyio.current_time()
    await workers.run("ann", lambda: None)
    assert anyio.current_time() - begun == pytest.approx(0.5)


async def test_memory_is_given_back_after_a_large_request_and_not_after_small_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = threading.Event()
    monkeypatch.setattr(module, "give_back_freed", given.set)
    monkeypatch.setattr(module, "_TRIM_SECONDS", 0.01)
    workers = Workers()
    (await workers.turn("ann", 1000)).end()
    assert workers._trim is None
    (await workers.turn("ann", 2**23)).end()
    assert await anyio.to_thread.run_sync(given.wait, PATIENCE)


async def test_tenants_that_are_done_are_forgotten() -> None:
    workers = Workers()
    for number in range(3 * module._REMEMBERED):
        await workers.run(f"tenant-{number}", time.thread_time)
        await anyio.sleep(0.01)
    assert len(workers._lanes) <= module._REMEMBERED
