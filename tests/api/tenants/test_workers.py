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


def prepare(workers: Workers, tenant: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """Prepare a short request that takes so long; how long it has to wait."""
    wait = workers.reserve_loop(tenant)
    clock = iter([0.0, seconds])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    workers.on_loop(tenant, lambda: None)
    return wait


async def test_a_tenant_with_many_short_requests_leaves_the_loop_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = Workers()
    prepared = 0
    for _ in range(20):
        prepare(workers, "loud", 0.004, monkeypatch)  # what they take is known then
    end = anyio.current_time() + 10
    while anyio.current_time() < end:
        assert prepare(workers, "quiet", 0.004, monkeypatch) == 0
        wait = prepare(workers, "loud", 0.004, monkeypatch)
        prepared += 1
        await anyio.sleep(max(wait, 0.001))
    assert prepared * 0.004 == pytest.approx(10 / 3, rel=0.2)


async def test_a_tenant_that_is_alone_never_waits_for_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers()
    prepare(workers, "quiet", 0.004, monkeypatch)
    await anyio.sleep(3)
    assert [prepare(workers, "loud", 0.004, monkeypatch) for _ in range(1000)] == [0.0] * 1000


async def test_a_request_whose_client_left_takes_nothing_from_its_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = Workers()
    for tenant in ("quiet", "loud"):
        for _ in range(20):
            prepare(workers, tenant, 0.004, monkeypatch)
    before = workers.reserve_loop("loud")
    for _ in range(1000):
        workers.release_loop("loud")
        workers.reserve_loop("loud")
    workers.release_loop("loud")
    assert workers.reserve_loop("loud") == pytest.approx(before)


async def test_no_request_waits_longer_than_a_second_for_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers()
    prepare(workers, "quiet", 0.004, monkeypatch)
    waits = [prepare(workers, "loud", 0.004, monkeypatch) for _ in range(1000)]
    assert max(waits) == 1.0
