"""Adapters without room in the pool: which are evicted, which must release their memory, and that none waits
for ever."""

import random

import anyio
import pytest
from recorders import MessageQueue
from store_bench import DIGESTS, EPOCH, Bench, StubTarget, bench, load, settled
from virtual_clock import virtual_clock

from personae.actors.messages import (
    AdapterLoaded,
    LoadAdapter,
    MemoryWanted,
    Pin,
    Pinned,
    Release,
    ReleaseRequest,
    Unpin,
)
from personae.lora.source import AdapterSource

pytestmark = virtual_clock


async def two_placed_and_one_without_room(b: Bench) -> list[str]:
    digests = one, two, three = DIGESTS[:3]
    await b.tell(*(Pin(digest, EPOCH) for digest in digests))
    await b.tell(AdapterLoaded(one, True), AdapterLoaded(two, True), AdapterLoaded(three, False))
    for digest in (one, two):
        b.queue_of(digest).clear()
    return digests


async def test_an_adapter_that_finds_no_room_tries_again_when_there_is_some() -> None:
    async with bench() as b:
        one, two = DIGESTS[:2]
        await b.tell(Pin(one, EPOCH), Pin(two, EPOCH))
        assert await b.tell(AdapterLoaded(one, True), AdapterLoaded(two, False)) == []
        assert await b.tell(Unpin(one, EPOCH)) == [two]
        await b.tell(AdapterLoaded(two, True))
        assert b.queue_of(two).take() == [Pinned(two, EPOCH)]


async def test_half_of_the_idle_adapters_may_be_evicted_for_one_without_room_the_longest_idle_first() -> None:
    async with bench() as b:
        *four, five = DIGESTS[:5]
        await b.tell(
            *(Pin(digest, EPOCH) for digest in four), *(AdapterLoaded(digest, True) for digest in four)
        )
        await b.tell(*(Unpin(digest, EPOCH) for digest in reversed(four)))
        assert await b.tell(Pin(five, EPOCH)) == [five]
        b.store.tell(AdapterLoaded(five, False))
        await settled()
        assert b.executor.take() == [Release((four[3], four[2])), load(4)]
        assert await b.tell(Pin(four[3], EPOCH), Pin(four[0], EPOCH)) == [four[3]], "it may have left by now"
        for left in ((four[1],), ()):
            b.store.tell(AdapterLoaded(five, False))
            await settled()
            assert [each.adapters for each in b.executor.take() if isinstance(each, Release)] == [
                left
            ] * bool(left)


async def test_idle_adapters_release_memory_for_sequences_or_else_the_next_one_that_becomes_idle() -> None:
    async with bench() as b:
        one, two = DIGESTS[:2]
        await b.tell(Pin(one, EPOCH), Pin(two, EPOCH), AdapterLoaded(one, True), AdapterLoaded(two, True))
        for delivered, released in (
            (Unpin(one, EPOCH), []),
            (MemoryWanted(), [Release((one,))]),
            (MemoryWanted(), []),
            (Unpin(two, EPOCH), [Release((two,))]),
        ):
            b.store.tell(delivered)
            await settled()
            assert b.executor.take() == released


async def test_room_that_is_made_while_the_pool_tries_is_not_missed() -> None:
    async with bench() as b:
        one, two = DIGESTS[:2]
        await b.tell(Pin(one, EPOCH), AdapterLoaded(one, True), Pin(two, EPOCH))
        b.store.tell(Unpin(one, EPOCH))  # the pool refused before this message
        assert await b.tell(AdapterLoaded(two, False)) == [two]


async def test_adapters_must_release_one_after_the_other_while_others_wait_and_not_otherwise() -> None:
    async with bench() as b:
        one, two, three = await two_placed_and_one_without_room(b)
        await anyio.sleep(0.4)
        assert not b.queue_of(one)
        await anyio.sleep(0.2)
        assert b.queue_of(one).take() == [ReleaseRequest(one, EPOCH)]
        await anyio.sleep(0.5)
        assert (b.queue_of(one).take(), b.queue_of(two).take()) == ([], [ReleaseRequest(two, EPOCH)])
        assert await b.tell(Unpin(one, EPOCH)) == [three]
        await b.tell(AdapterLoaded(three, True))
        await anyio.sleep(10)
        assert not b.queue_of(two)
        assert b.queue_of(three).take() == [Pinned(three, EPOCH)]


async def test_an_adapter_that_does_not_release_in_time_must_do_so_now() -> None:
    async with bench() as b:
        one, two, three = await two_placed_and_one_without_room(b)
        await anyio.sleep(2.2)
        assert b.queue_of(one).take() == [ReleaseRequest(one, EPOCH)], "asked once"
        await anyio.sleep(0.5)
        assert b.queue_of(one).take() == [ReleaseRequest(one, EPOCH, now=True)]
        await anyio.sleep(0.5)
        assert b.queue_of(two).take() == [ReleaseRequest(two, EPOCH), ReleaseRequest(two, EPOCH, now=True)]
        assert await b.tell(Unpin(one, EPOCH)) == [three]
        await b.tell(AdapterLoaded(three, True), Pin(one, EPOCH), AdapterLoaded(one, False))
        b.queue_of(three).clear()
        await anyio.sleep(0.6)
        assert b.queue_of(three).take() == [ReleaseRequest(three, EPOCH)], "it begins anew"


async def test_an_adapter_that_was_asked_to_release_goes_before_adapters_that_were_idle_longer() -> None:
    async with bench() as b:
        one, two, three = DIGESTS[:3]
        await b.tell(*(Pin(digest, EPOCH) for digest in (one, two, three)))
        await b.tell(AdapterLoaded(one, True), AdapterLoaded(two, True), AdapterLoaded(three, False))
        await anyio.sleep(0.6)
        assert b.queue_of(one).take() == [Pinned(one, EPOCH), ReleaseRequest(one, EPOCH)]
        b.store.tell(Unpin(two, EPOCH))
        await settled()
        assert b.executor.take() == [Release((two,)), load(2)]
        b.store.tell(Unpin(one, EPOCH))  # `three` is being tried, so it is not refused now
        await settled()
        assert b.executor.take() == [Release((one,))]
        assert await b.tell(Pin(one, EPOCH)) == [one], "it is behind three"


class Filed(StubTarget):
    """Adapters that are all found at once, in files of the pool's format."""

    def find(self, digest: str) -> AdapterSource:
        return AdapterSource((), stored=True)


async def test_an_adapter_without_room_tries_alone_after_many_have_overtaken_it() -> None:
    async with bench(Filed()) as b:
        first, *others = DIGESTS
        await b.tell(Pin(first, EPOCH), AdapterLoaded(first, False))
        past = 0
        for digest in others * 10:
            if await b.tell(Pin(digest, EPOCH)) == []:
                break
            past += 1
            await b.tell(AdapterLoaded(digest, True))
            assert await b.tell(Unpin(digest, EPOCH)) == [first], "there is new room"
            await b.tell(AdapterLoaded(first, False))
        assert past == 16
        assert await b.tell(AdapterLoaded(first, True)) == [digest]


class Pool:
    """Has room for seven. Tries pending loads once per step. `sizes` by digest."""

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
                elif isinstance(message, LoadAdapter):
                    digest = message.adapter
                    placed = sum(map(self._sizes.__getitem__, self._held | {digest})) <= 7
                    self._held |= {digest} if placed else set()
                    self._bench.store.tell(AdapterLoaded(digest, placed))


async def ask_for_ever(b: Bench, digest: str, seconds: random.Random, waits: list[float]) -> None:
    """A queue whose requests take up to a second, and which releases its adapter when asked. Notes how long
    it waits."""
    envelopes = b.queue_of(digest)
    while True:
        begun = anyio.current_time()
        b.store.tell(Pin(digest, EPOCH))
        await until(envelopes, 1000.0)
        waits.append(anyio.current_time() - begun)
        await until(envelopes, seconds.random())
        b.store.tell(Unpin(digest, EPOCH))


async def until(envelopes: MessageQueue, seconds: float) -> None:
    """Wait for a message, at most so many seconds."""
    ended = anyio.current_time() + seconds
    while anyio.current_time() < ended and not envelopes.take():  # noqa: ASYNC110  as its reader does
        await anyio.sleep(0.1)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("library", [StubTarget, Filed])
async def test_no_adapter_waits_for_ever_however_large_it_is_and_however_many_small_ones_come(
    seed: int, library: type[StubTarget]
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
