"""The line before the device, with a make-believe executor and queues that only note."""

import random
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from patience import soon
from virtual_clock import virtual_clock

from personae.actors.adapter_store import AdapterStore
from personae.actors.kit.mailbox import Ref
from personae.actors.kit.supervisor import Supervisor
from personae.actors.messages import (
    Holdings,
    Message,
    Pin,
    Pinned,
    Place,
    Placed,
    Release,
    Unpin,
    Wanted,
    Yield,
)
from personae.lora.adapter import Adapter, LoraPair, LoraShapes, Stored, make_adapter
from personae.lora.library import AdapterLibrary

pytestmark = virtual_clock
LIFE = 3


class Letters(deque[Message]):
    """A mailbox that only notes."""

    tell = deque.append

    def take(self) -> list[Message]:
        taken = list(self)
        self.clear()
        return taken


def adapter(seed: int) -> Adapter:
    pair = LoraPair(torch.full((1, 2), float(seed)), torch.ones(1, 2), 1.0)
    return make_adapter(f"{seed}", {(0, "q"): pair})


ADAPTERS = [adapter(seed) for seed in range(1, 8)]
DIGESTS = [each.digest for each in ADAPTERS]


class Shelf(AdapterLibrary):
    """A library whose adapters are all on the host."""

    def __init__(self) -> None:
        super().__init__(LoraShapes(1, {"q": (2, 2)}), {}, None, 10**9)
        for each in ADAPTERS:
            self.put(each)


class Bench:
    """A store, and what it said to the others."""

    def __init__(self, store: Ref[Message]) -> None:
        self.store = store
        self.executor = Letters()
        self.streamer = Letters()
        self.queues: dict[str | None, Letters] = {}

    def queue_of(self, digest: str | None) -> Letters:
        return self.queues.setdefault(digest, Letters())

    async def offered(self, count: int) -> list[str]:
        """The digests of so many that the executor is asked to place, which threads have read."""
        await soon(
            lambda: sum(isinstance(each, Place) for each in self.executor) >= count, f"{count} have been read"
        )
        await settled()
        return [each.adapter.digest for each in self.executor.take() if isinstance(each, Place)]

    async def tell(self, *messages: Message) -> list[str]:
        """Say it; the digests that the executor is then asked to place."""
        for message in messages:
            self.store.tell(message)
        await settled()
        return [each.adapter.digest for each in self.executor.take() if isinstance(each, Place)]


async def settled() -> None:
    """Let the others run until they wait, with no time passing."""
    for _ in range(30):
        await anyio.lowlevel.checkpoint()


@asynccontextmanager
async def bench(library: AdapterLibrary | None = None) -> AsyncIterator[Bench]:
    root = Supervisor("test", max_restarts=0)
    made: list[Any] = []
    store: Ref[Message] = root.spawn(
        "store",
        lambda: AdapterStore(library or Shelf(), LIFE, made[0].executor, made[0].queue_of, made[0].streamer),
        capacity=100,
    )
    made.append(Bench(store))
    async with root:
        yield made[0]


async def test_a_pin_is_answered_when_the_adapter_is_placed_and_at_once_if_it_is() -> None:
    async with bench() as b:
        one = DIGESTS[0]
        assert await b.tell(Pin(one, LIFE), Pin(one, LIFE)) == [one]
        assert not b.queue_of(one)
        await b.tell(Placed(one, True))
        assert b.queue_of(one).take() == [Pinned(one, LIFE)]
        assert await b.tell(Pin(one, LIFE)) == []
        assert b.queue_of(one).take() == [Pinned(one, LIFE)]


async def test_who_comes_back_to_an_adapter_is_answered_at_once_and_the_executor_is_not_asked() -> None:
    async with bench() as b:
        one = DIGESTS[0]
        await b.tell(Pin(one, LIFE), Placed(one, True))
        b.queue_of(one).clear()
        b.store.tell(Unpin(one, LIFE))
        await settled()
        assert b.executor.take() == []
        b.store.tell(Pin(one, LIFE))
        await settled()
        assert b.executor.take() == []
        assert b.queue_of(one).take() == [Pinned(one, LIFE)]
        await anyio.sleep(5)
        assert b.executor.take() == []


async def test_what_was_meant_for_another_life_is_ignored() -> None:
    async with bench() as b:
        assert await b.tell(Pin(DIGESTS[0], LIFE - 1), Unpin(DIGESTS[0], LIFE + 1)) == []
        assert not b.executor


async def test_a_few_are_offered_at_a_time_and_the_next_when_one_is_settled() -> None:
    async with bench() as b:
        assert await b.tell(*(Pin(digest, LIFE) for digest in DIGESTS)) == DIGESTS[:4]
        assert await b.tell(Placed(DIGESTS[1], True)) == [DIGESTS[4]]
        assert await b.tell(Placed(DIGESTS[0], False, "too large")) == [DIGESTS[5]]
        assert b.queue_of(DIGESTS[0]).take() == [Pinned(DIGESTS[0], LIFE, "too large")]


async def test_who_finds_no_room_tries_again_when_there_is_some() -> None:
    async with bench() as b:
        one, two = DIGESTS[:2]
        await b.tell(Pin(one, LIFE), Pin(two, LIFE))
        assert await b.tell(Placed(one, True), Placed(two, False)) == []
        assert await b.tell(Unpin(one, LIFE)) == [two]
        await b.tell(Placed(two, True))
        assert b.queue_of(two).take() == [Pinned(two, LIFE)]


async def test_for_who_finds_no_room_half_of_those_that_nobody_uses_may_leave_the_longest_idle_first() -> (
    None
):
    async with bench() as b:
        *four, five = DIGESTS[:5]
        await b.tell(*(Pin(digest, LIFE) for digest in four), *(Placed(digest, True) for digest in four))
        await b.tell(*(Unpin(digest, LIFE) for digest in reversed(four)))
        assert await b.tell(Pin(five, LIFE)) == [five]
        b.store.tell(Placed(five, False))
        await settled()
        assert b.executor.take() == [Release((four[3], four[2])), Place(ADAPTERS[4])]
        assert await b.tell(Pin(four[3], LIFE), Pin(four[0], LIFE)) == [four[3]], "it may have left by now"
        for left in ((four[1],), ()):
            b.store.tell(Placed(five, False))
            await settled()
            assert [each.adapters for each in b.executor.take() if isinstance(each, Release)] == [
                left
            ] * bool(left)


async def test_memory_that_sequences_want_is_let_go_by_the_idle_or_else_by_who_is_idle_next() -> None:
    async with bench() as b:
        one, two = DIGESTS[:2]
        await b.tell(Pin(one, LIFE), Pin(two, LIFE), Placed(one, True), Placed(two, True))
        for told, released in (
            (Unpin(one, LIFE), []),
            (Wanted(), [Release((one,))]),
            (Wanted(), []),
            (Unpin(two, LIFE), [Release((two,))]),
        ):
            b.store.tell(told)
            await settled()
            assert b.executor.take() == released


async def test_room_that_is_made_while_the_pool_is_asked_is_not_overlooked() -> None:
    async with bench() as b:
        one, two = DIGESTS[:2]
        await b.tell(Pin(one, LIFE), Placed(one, True), Pin(two, LIFE))
        b.store.tell(Unpin(one, LIFE))  # the pool said no before it heard of this
        assert await b.tell(Placed(two, False)) == [two]


async def test_one_adapter_after_the_other_must_yield_to_those_that_wait_and_none_when_nobody_does() -> None:
    async with bench() as b:
        one, two, three = DIGESTS[:3]
        await b.tell(*(Pin(digest, LIFE) for digest in (one, two, three)))
        await b.tell(Placed(one, True), Placed(two, True), Placed(three, False))
        for digest in (one, two):
            b.queue_of(digest).clear()
        await anyio.sleep(0.4)
        assert not b.queue_of(one)
        await anyio.sleep(0.2)
        assert b.queue_of(one).take() == [Yield(one, LIFE)]
        await anyio.sleep(0.5)
        assert (b.queue_of(one).take(), b.queue_of(two).take()) == ([], [Yield(two, LIFE)])
        assert await b.tell(Unpin(one, LIFE)) == [three]
        await b.tell(Placed(three, True))
        await anyio.sleep(10)
        assert not b.queue_of(two)
        assert b.queue_of(three).take() == [Pinned(three, LIFE)]


async def test_who_was_told_to_yield_and_does_not_in_time_must_do_so_now() -> None:
    async with bench() as b:
        one, two, three = DIGESTS[:3]
        await b.tell(*(Pin(digest, LIFE) for digest in (one, two, three)))
        await b.tell(Placed(one, True), Placed(two, True), Placed(three, False))
        for digest in (one, two):
            b.queue_of(digest).clear()
        await anyio.sleep(2.2)
        assert b.queue_of(one).take() == [Yield(one, LIFE)], "told once"
        await anyio.sleep(0.5)
        assert b.queue_of(one).take() == [Yield(one, LIFE, now=True)]
        await anyio.sleep(0.5)
        assert b.queue_of(two).take() == [Yield(two, LIFE), Yield(two, LIFE, now=True)]
        assert await b.tell(Unpin(one, LIFE)) == [three]
        await b.tell(Placed(three, True), Pin(one, LIFE), Placed(one, False))
        b.queue_of(three).clear()
        await anyio.sleep(0.6)
        assert b.queue_of(three).take() == [Yield(three, LIFE)], "it begins anew"


async def test_who_was_told_to_yield_lets_go_at_once_though_others_were_idle_before() -> None:
    async with bench() as b:
        one, two, three = DIGESTS[:3]
        await b.tell(*(Pin(digest, LIFE) for digest in (one, two, three)))
        await b.tell(Placed(one, True), Placed(two, True), Placed(three, False))
        await anyio.sleep(0.6)
        assert b.queue_of(one).take() == [Pinned(one, LIFE), Yield(one, LIFE)]
        b.store.tell(Unpin(two, LIFE))
        await settled()
        assert b.executor.take() == [Release((two,)), Place(ADAPTERS[2])]
        b.store.tell(Unpin(one, LIFE))  # three is being tried, so it has not been refused now
        await settled()
        assert b.executor.take() == [Release((one,))]
        assert await b.tell(Pin(one, LIFE)) == [one], "it is behind three"


async def test_what_is_held_and_how_long_it_took_is_told_when_it_has_changed() -> None:
    shelf = Shelf()
    async with bench(shelf) as b:
        one, two = DIGESTS[:2]
        await b.tell(Pin(one, LIFE))
        await anyio.sleep(2)
        await b.tell(Placed(one, True, None, 1, 1, 0))
        host, host_bytes = shelf.kept
        assert b.streamer.take()[-1] == Holdings(
            device=1,
            host=host,
            host_bytes=host_bytes,
            loads={"host": 1},
            load_seconds={"host": pytest.approx(2)},
        )
        await b.tell(Unpin(one, LIFE), Pin(one, LIFE), Placed(one, True, None, 1, 1, 0))
        assert b.streamer.take()[-1].loads == {"host": 1, "device": 1}
        await b.tell(Unpin(one, LIFE), Pin(two, LIFE))
        assert b.streamer.take()[-1].line == 1
        await b.tell(Placed(two, True, None, 1, 2, 1), Unpin(two, LIFE))
        last = b.streamer.take()[-1]
        assert (last.loads, last.evictions, last.line) == ({"host": 2, "device": 1}, 1, 0)
        await b.tell(Pin(DIGESTS[2], LIFE - 1))
        assert b.streamer.take() == [], "nothing has changed"


class Disk(Shelf):
    """Nothing is on the host; `stored` are found in files of the pool's own form. Counts what is read and in
    memory: `most` at a time."""

    def __init__(self, stored: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self._filed = stored
        self.in_memory: set[str] = set()
        self.most = 0

    def get(self, digest: str) -> None:
        return None

    def read(self, digest: str) -> Adapter:
        found = ADAPTERS[DIGESTS.index(digest)]
        if digest in self._filed:
            return replace(found, stored=Stored(Path("none"), {}))
        self.in_memory.add(digest)
        self.most = max(self.most, len(self.in_memory))
        return found


async def test_an_adapter_that_is_read_from_disk_counts_as_such() -> None:
    async with bench(Disk()) as b:
        b.store.tell(Pin(DIGESTS[0], LIFE))
        assert await b.offered(1) == [DIGESTS[0]]
        await b.tell(Placed(DIGESTS[0], True, None, 1, 1, 0))
        assert b.streamer.take()[-1].loads == {"disk": 1}


async def test_all_that_are_read_from_their_files_into_their_place_are_offered_though_none_is_settled() -> (
    None
):
    async with bench(Disk(frozenset(DIGESTS))) as b:
        for digest in DIGESTS:
            b.store.tell(Pin(digest, LIFE))
        assert sorted(await b.offered(len(DIGESTS))) == sorted(DIGESTS)


async def test_those_that_take_memory_until_they_are_placed_are_few_at_a_time_whoever_is_between_them() -> (
    None
):
    disk = Disk(frozenset(DIGESTS[::4]))
    async with bench(disk) as b:
        for digest in DIGESTS:
            b.store.tell(Pin(digest, LIFE))
        left, offered = set(DIGESTS), list[str]()
        while left:
            offered = offered or await b.offered(1)
            left -= {*offered}
            disk.in_memory -= {*offered}
            offered = await b.tell(*(Placed(digest, True) for digest in offered))
        assert 0 < disk.most <= 4


class Filed(Shelf):
    """All are found at once, in files of the pool's own form."""

    def get(self, digest: str) -> Adapter:
        return replace(ADAPTERS[DIGESTS.index(digest)], stored=Stored(Path("none"), {}))


async def test_who_found_no_room_tries_alone_when_many_have_gone_past_it() -> None:
    async with bench(Filed()) as b:
        first, *others = DIGESTS
        await b.tell(Pin(first, LIFE), Placed(first, False))
        past = 0
        for digest in others * 10:
            if await b.tell(Pin(digest, LIFE)) == []:
                break
            past += 1
            await b.tell(Placed(digest, True))
            assert await b.tell(Unpin(digest, LIFE)) == [first], "there is new room"
            await b.tell(Placed(first, False))
        assert past == 16
        assert await b.tell(Placed(first, True)) == [digest]


class Pool:
    """Has room for seven; tries what it is asked to place once in a step. `sizes` by digest."""

    def __init__(self, b: Bench, sizes: dict[str, int]) -> None:
        self._bench = b
        self._sizes = sizes
        self._held: set[str] = set()

    async def run(self) -> None:
        while True:
            await anyio.sleep(0.1)
            for message in self._bench.executor.take():
                if isinstance(message, Release):
                    self._held.difference_update(message.adapters)
                elif isinstance(message, Place):
                    digest = message.adapter.digest
                    placed = sum(map(self._sizes.__getitem__, self._held | {digest})) <= 7
                    self._held |= {digest} if placed else set()
                    self._bench.store.tell(Placed(digest, placed))


async def ask_for_ever(b: Bench, digest: str, seconds: random.Random, waits: list[float]) -> None:
    """A queue whose requests take up to a second, and which yields when it is told to; notes its waits."""
    letters = b.queue_of(digest)
    while True:
        begun = anyio.current_time()
        b.store.tell(Pin(digest, LIFE))
        await until(letters, 1000.0)
        waits.append(anyio.current_time() - begun)
        await until(letters, seconds.random())
        b.store.tell(Unpin(digest, LIFE))


async def until(letters: Letters, seconds: float) -> None:
    """Something has come, or so long."""
    ended = anyio.current_time() + seconds
    while anyio.current_time() < ended and not letters.take():  # noqa: ASYNC110  as its reader does
        await anyio.sleep(0.1)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("library", [Shelf, Filed])
async def test_nobody_waits_for_ever_however_large_it_is_and_however_many_small_ones_come(
    seed: int, library: type[Shelf]
) -> None:
    rng = random.Random(seed)
    sizes = {digest: rng.randint(1, 2) for digest in DIGESTS} | {rng.choice(DIGESTS): 7}
    waits: dict[str, list[float]] = {digest: [] for digest in DIGESTS}
    async with bench(library()) as b, anyio.create_task_group() as tasks:
        tasks.start_soon(Pool(b, sizes).run)
        for digest in DIGESTS:
            tasks.start_soon(ask_for_ever, b, digest, rng, waits[digest])
        await anyio.sleep(60)
        tasks.cancel_scope.cancel()
    assert min(map(len, waits.values())) >= 4
    assert max(map(max, waits.values())) < 15
