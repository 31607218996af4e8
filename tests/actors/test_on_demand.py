"""Engines that run while they are needed, within one memory."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from virtual_clock import virtual_clock

from personae.actors import on_demand
from personae.actors.on_demand import EngineMemory, OnDemandEngine
from personae.errors import LoadError, Overloaded

pytestmark = virtual_clock


@dataclass
class Model:
    """A fake engine: `events` has what happens to it. It takes `seconds` to start, and does not if there is
    a `failure`."""

    name: str
    events: list[str]
    seconds: float = 1.0
    failure: Exception | None = None
    gone: anyio.Event = field(default_factory=anyio.Event)
    client: Any = None

    @property
    def lost(self) -> Callable[[], Awaitable[None]]:
        return self.gone.wait

    @asynccontextmanager
    async def open(self) -> AsyncIterator["Model"]:
        self.gone = anyio.Event()
        await anyio.sleep(self.seconds)
        if self.failure is not None:
            raise self.failure
        self.events.append(f"{self.name} starts")
        yield self
        self.events.append(f"{self.name} stops")


@dataclass
class Engines:
    """Some engines by name, and what happens to them."""

    memory: EngineMemory
    models: dict[str, Model]
    engines: dict[str, OnDemandEngine[Model]]
    events: list[str]

    async def ask(self, name: str, seconds: float = 1.0) -> None:
        async with self.engines[name].using():
            self.events.append(f"{name} answers")
            await anyio.sleep(seconds)


@asynccontextmanager
async def engines(
    limit: int, sizes: dict[str, int], keep_alive: float | None = None
) -> AsyncIterator[Engines]:
    memory, events = EngineMemory(limit), list[str]()
    models = {name: Model(name, events) for name in sizes}
    made = {
        name: OnDemandEngine(name, size, models[name].open, memory, keep_alive)
        for name, size in sizes.items()
    }
    async with anyio.create_task_group() as tasks:
        for each in made.values():
            tasks.start_soon(each.run)
        yield Engines(memory, models, made, events)
        tasks.cancel_scope.cancel()


async def test_an_engine_starts_with_its_first_request_and_stays() -> None:
    async with engines(10, {"a": 5, "b": 5}) as some:
        await anyio.sleep(1000)
        assert some.events == []
        assert some.engines["a"].state == "asleep"
        await some.ask("a")
        await anyio.sleep(1000)
        await some.ask("a")
        assert some.events == ["a starts", "a answers", "a answers"]
        assert [each.state for each in some.engines.values()] == ["running", "asleep"]


async def test_requests_that_wait_for_an_engine_share_its_start() -> None:
    async with engines(10, {"a": 5}) as some:
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(some.ask, "a")
        assert some.events == ["a starts"] + 5 * ["a answers"]
        assert some.engines["a"].starts == 1


async def test_the_least_recently_used_engine_makes_room() -> None:
    async with engines(10, {"a": 5, "b": 5, "c": 5}) as some:
        for name in ("a", "b", "a", "c"):
            await some.ask(name)
            await anyio.sleep(1)
        assert some.events[-3:] == ["b stops", "c starts", "c answers"]
        assert [each.state for each in some.engines.values()] == ["running", "asleep", "running"]


async def test_as_many_engines_stop_as_one_needs() -> None:
    async with engines(10, {"a": 3, "b": 3, "large": 9, "c": 3}) as some:
        for name in ("a", "b", "large"):
            await some.ask(name)
        assert sorted(some.events[-4:-2]) == ["a stops", "b stops"]
        assert some.events[-2:] == ["large starts", "large answers"]
        await some.ask("c")
        assert some.events[-3:] == ["large stops", "c starts", "c answers"]


async def test_the_engines_never_have_more_than_their_memory() -> None:
    most = 0
    async with engines(10, {"a": 4, "b": 5, "c": 6, "d": 3}) as some:
        async with anyio.create_task_group() as tasks:
            for number in range(40):
                tasks.start_soon(some.ask, "abcd"[number * 7 % 4], number % 3)
                await anyio.sleep(0.5)
                running = sum(each.size for each in some.engines.values() if each.state == "running")
                most = max(most, running)
                assert some.memory.free >= 0
        assert 0 < most <= 10
        assert sum("answers" in event for event in some.events) == 40


async def test_a_busy_engine_finishes_its_requests_before_it_makes_room() -> None:
    async with engines(5, {"a": 5, "b": 5}) as some, anyio.create_task_group() as tasks:
        tasks.start_soon(some.ask, "a", 100.0)
        await anyio.sleep(5)
        tasks.start_soon(some.ask, "b")
        await anyio.sleep(5)
        tasks.start_soon(some.ask, "a")  # it waits its turn, else b would never have one
        await anyio.sleep(200)
        assert some.events == [
            *("a starts", "a answers", "a stops", "b starts", "b answers"),
            *("b stops", "a starts", "a answers"),
        ]


async def test_requests_for_a_running_engine_do_not_wait_for_the_start_of_another() -> None:
    async with engines(10, {"a": 5, "slow": 5}) as some, anyio.create_task_group() as tasks:
        some.models["slow"].seconds = 300.0
        await some.ask("a")
        tasks.start_soon(some.ask, "slow")
        await anyio.lowlevel.checkpoint()
        begun = anyio.current_time()
        await some.ask("a", 1.0)
        assert anyio.current_time() - begun < 2


async def test_an_engine_without_requests_stops_after_a_time() -> None:
    async with engines(10, {"a": 5}, keep_alive=60.0) as some:
        for pause in (50, 50, 70):
            await some.ask("a")
            await anyio.sleep(pause)
        assert some.events == ["a starts", *3 * ["a answers"], "a stops"]
        assert some.memory.free == 10
        await some.ask("a")
        assert some.events[-2:] == ["a starts", "a answers"]


async def test_with_no_time_an_engine_serves_the_requests_that_wait_and_stops() -> None:
    async with engines(10, {"a": 5}, keep_alive=0.0) as some:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(some.ask, "a")
            tasks.start_soon(some.ask, "a")
        await anyio.sleep(1)
        assert some.events == ["a starts", "a answers", "a answers", "a stops"]


async def test_an_engine_that_cannot_start_refuses_its_requests_and_is_tried_again_later() -> None:
    async with engines(10, {"a": 5, "b": 10}) as some:
        some.models["a"].failure = LoadError("The weights are damaged.")
        begun = anyio.current_time()
        for _ in range(2):  # the second one does not try again
            with pytest.raises(Overloaded, match="`a` cannot start: The weights are damaged"):
                await some.ask("a")
        assert anyio.current_time() - begun < 2
        assert some.engines["a"].state == "failed"
        assert not some.engines["a"].stats().ready
        await some.ask("b")  # it has all of the memory
        some.models["a"].failure = None
        await anyio.sleep(on_demand.RETRY_SECONDS)
        await some.ask("a")
        assert some.events[-2:] == ["a starts", "a answers"]


async def test_an_engine_that_has_failed_for_good_is_started_anew() -> None:
    async with engines(10, {"a": 5}) as some:
        await some.ask("a")
        some.models["a"].gone.set()
        await anyio.sleep(1)
        assert some.events == ["a starts", "a answers", "a stops"]
        await some.ask("a")
        assert some.engines["a"].starts == 2


async def test_a_request_waits_for_room_for_a_limited_time() -> None:
    async with engines(5, {"a": 5, "b": 5}) as some, anyio.create_task_group() as tasks:
        tasks.start_soon(some.ask, "a", 10 * on_demand.START_SECONDS)
        await anyio.sleep(5)
        begun = anyio.current_time()
        with pytest.raises(Overloaded, match="did not start within"):
            await some.ask("b")
        assert anyio.current_time() - begun == pytest.approx(on_demand.START_SECONDS)
        tasks.cancel_scope.cancel()


async def test_so_many_requests_wait_for_an_engine() -> None:
    async with engines(5, {"a": 5}) as some, anyio.create_task_group() as tasks:
        some.models["a"].seconds = 100.0
        for _ in range(on_demand.MAX_WAITING):
            tasks.start_soon(partial(some.ask, "a", 0.0))
        await anyio.sleep(1)
        with pytest.raises(Overloaded, match=f"{on_demand.MAX_WAITING} requests wait"):
            await some.ask("a")


async def test_a_request_that_leaves_while_it_waits_leaves_nothing_behind() -> None:
    async with engines(5, {"a": 5, "b": 5}) as some:
        with anyio.move_on_after(0.5):
            await some.ask("a")
        await anyio.sleep(5)
        await some.ask("b")
        assert some.events == ["a starts", "a stops", "b starts", "b answers"]
