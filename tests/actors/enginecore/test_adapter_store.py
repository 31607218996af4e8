"""What the adapter store answers and offers. test_adapter_room.py covers adapters that find no room."""

import anyio
import pytest
from patience import soon
from store_bench import DIGESTS, EPOCH, StubTarget, bench, settled
from virtual_clock import virtual_clock

from personae.actors.messages import (
    AdapterLoaded,
    AdapterStats,
    KeepLoaded,
    MemoryWanted,
    Pin,
    Pinned,
    Release,
    ReleaseRequest,
    Unpin,
)
from personae.lora.source import AdapterSource

pytestmark = virtual_clock


async def test_a_pin_is_answered_when_the_adapter_is_placed_and_at_once_if_it_is() -> None:
    async with bench() as b:
        one = DIGESTS[0]
        assert await b.tell(Pin(one, EPOCH), Pin(one, EPOCH)) == [one]
        assert not b.queue_of(one)
        await b.tell(AdapterLoaded(one, True))
        assert b.queue_of(one).take() == [Pinned(one, EPOCH)]
        assert await b.tell(Pin(one, EPOCH)) == []
        assert b.queue_of(one).take() == [Pinned(one, EPOCH)]


async def test_a_second_pin_of_a_held_adapter_is_answered_at_once_without_the_executor() -> None:
    async with bench() as b:
        one = DIGESTS[0]
        await b.tell(Pin(one, EPOCH), AdapterLoaded(one, True))
        b.queue_of(one).clear()
        b.store.tell(Unpin(one, EPOCH))
        await settled()
        assert b.executor.take() == []
        b.store.tell(Pin(one, EPOCH))
        await settled()
        assert b.executor.take() == []
        assert b.queue_of(one).take() == [Pinned(one, EPOCH)]
        await anyio.sleep(5)
        assert b.executor.take() == []


async def test_messages_for_another_epoch_are_ignored() -> None:
    async with bench() as b:
        assert await b.tell(Pin(DIGESTS[0], EPOCH - 1), Unpin(DIGESTS[0], EPOCH + 1)) == []
        assert not b.executor


async def test_a_few_adapters_are_offered_at_a_time_and_the_next_when_one_is_done() -> None:
    async with bench() as b:
        assert await b.tell(*(Pin(digest, EPOCH) for digest in DIGESTS)) == DIGESTS[:4]
        assert await b.tell(AdapterLoaded(DIGESTS[1], True)) == [DIGESTS[4]]
        assert await b.tell(AdapterLoaded(DIGESTS[0], False, "too large")) == [DIGESTS[5]]
        assert b.queue_of(DIGESTS[0]).take() == [Pinned(DIGESTS[0], EPOCH, "too large")]


async def test_statistics_are_sent_when_they_have_changed() -> None:
    target = StubTarget()
    async with bench(target) as b:
        one, two = DIGESTS[:2]
        await b.tell(Pin(one, EPOCH))
        await anyio.sleep(2)
        await b.tell(AdapterLoaded(one, True, None, 1, 1, 0))
        host, host_bytes = target.kept
        assert b.streamer.take()[-1] == AdapterStats(
            device=1,
            host=host,
            host_bytes=host_bytes,
            loads={"host": 1},
            load_seconds={"host": pytest.approx(2)},
        )
        await b.tell(Unpin(one, EPOCH), Pin(one, EPOCH), AdapterLoaded(one, True, None, 1, 1, 0))
        assert b.streamer.take()[-1].loads == {"host": 1, "device": 1}
        await b.tell(Unpin(one, EPOCH), Pin(two, EPOCH))
        assert b.streamer.take()[-1].line == 1
        await b.tell(AdapterLoaded(two, True, None, 1, 2, 1), Unpin(two, EPOCH))
        last = b.streamer.take()[-1]
        assert (last.loads, last.evictions, last.line) == ({"host": 2, "device": 1}, 1, 0)
        await b.tell(Pin(DIGESTS[2], EPOCH - 1))
        assert b.streamer.take() == [], "nothing has changed"


class Disk(StubTarget):
    """Nothing is on the host. The adapters in `stored` have files of the pool's format. Counts reads, and
    reads that use memory at the same time (`most`)."""

    def __init__(self, stored: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self._filed = stored
        self.in_memory: set[str] = set()
        self.most = 0

    def find(self, digest: str) -> None:
        return None

    def read(self, digest: str) -> AdapterSource:
        if digest in self._filed:
            return AdapterSource((), stored=True)
        self.in_memory.add(digest)
        self.most = max(self.most, len(self.in_memory))
        return AdapterSource(())


async def test_an_adapter_that_is_read_from_disk_counts_as_such() -> None:
    async with bench(Disk()) as b:
        b.store.tell(Pin(DIGESTS[0], EPOCH))
        assert await b.offered(1) == [DIGESTS[0]]
        await b.tell(AdapterLoaded(DIGESTS[0], True, None, 1, 1, 0))
        assert b.streamer.take()[-1].loads == {"disk": 1}


async def test_adapters_that_are_read_straight_into_the_pool_are_offered_without_waiting_for_each_other() -> (
    None
):
    async with bench(Disk(frozenset(DIGESTS))) as b:
        for digest in DIGESTS:
            b.store.tell(Pin(digest, EPOCH))
        assert sorted(await b.offered(len(DIGESTS))) == sorted(DIGESTS)


async def test_few_adapters_at_a_time_use_host_memory_until_they_are_loaded() -> None:
    disk = Disk(frozenset(DIGESTS[::4]))
    async with bench(disk) as b:
        for digest in DIGESTS:
            b.store.tell(Pin(digest, EPOCH))
        left, offered = set(DIGESTS), list[str]()
        while left:
            offered = offered or await b.offered(1)
            left -= {*offered}
            disk.in_memory -= {*offered}
            offered = await b.tell(*(AdapterLoaded(digest, True) for digest in offered))
        assert 0 < disk.most <= 4


async def test_an_adapter_whose_file_was_damaged_is_read_again_once_without_an_error() -> None:
    async with bench(Disk(frozenset(DIGESTS))) as b:
        b.store.tell(Pin(DIGESTS[0], EPOCH))
        assert await b.offered(1) == [DIGESTS[0]]
        b.store.tell(AdapterLoaded(DIGESTS[0], False, "the file has changed"))
        assert await b.offered(1) == [DIGESTS[0]]
        assert b.queue_of(DIGESTS[0]).take() == []
        await b.tell(AdapterLoaded(DIGESTS[0], False, "the file has changed"))
        assert b.queue_of(DIGESTS[0]).take() == [Pinned(DIGESTS[0], EPOCH, "the file has changed")]
        b.store.tell(Pin(DIGESTS[0], EPOCH))
        assert await b.offered(1) == [DIGESTS[0]], "it has its two tries anew"
        b.store.tell(AdapterLoaded(DIGESTS[0], False, "the file has changed"))
        assert await b.offered(1) == [DIGESTS[0]]


async def test_a_placed_adapter_leaves_the_host_as_long_as_all_have_room_on_the_device() -> None:
    target = StubTarget()
    left: list[str] = []
    target.placed = left.append  # type: ignore[method-assign]  # of this library alone
    async with bench(target) as b:
        one, two = DIGESTS[:2]
        await b.tell(Pin(one, EPOCH), AdapterLoaded(one, True, None, 1, 1, 0))
        await soon(lambda: left == [one], "its copy is dropped on a thread")
        await b.tell(Pin(two, EPOCH), AdapterLoaded(two, True, None, 1, 2, evictions=1))
        await anyio.sleep(5)
        assert left == [one], "others may soon need its place, and it would be read again and again"


async def test_an_adapter_that_is_kept_loaded_is_loaded_before_a_request_and_released_for_nobody() -> None:
    async with bench() as b:
        kept, other = DIGESTS[:2]
        assert await b.tell(KeepLoaded((kept,))) == [kept]
        assert await b.tell(AdapterLoaded(kept, True), Pin(other, EPOCH), AdapterLoaded(other, True)) == [
            other
        ]
        assert not b.queue_of(kept)
        assert [each.kept_loaded for each in b.streamer.take() if isinstance(each, AdapterStats)][-1] == 1
        b.store.tell(Unpin(other, EPOCH))
        b.store.tell(MemoryWanted())
        b.store.tell(MemoryWanted())
        await settled()
        assert b.executor.take() == [Release((other,))]
        await b.tell(Pin(kept, EPOCH), Pin(other, EPOCH), AdapterLoaded(other, False))
        assert b.queue_of(kept).take() == [Pinned(kept, EPOCH)]
        await anyio.sleep(5)
        assert b.queue_of(kept).take() == []  # it is not asked to make room


async def test_an_adapter_that_is_no_longer_kept_loaded_makes_room_like_others() -> None:
    async with bench() as b:
        kept, other = DIGESTS[:2]
        await b.tell(KeepLoaded((kept,)), AdapterLoaded(kept, True), Pin(other, EPOCH))
        await b.tell(AdapterLoaded(other, False))
        b.store.tell(KeepLoaded(()))
        await settled()
        assert Release((kept,)) in b.executor.take()
        await b.tell(AdapterLoaded(other, True), Pin(kept, EPOCH), AdapterLoaded(kept, False))
        b.queue_of(other).clear()
        await anyio.sleep(1)
        assert b.queue_of(other).take() == [ReleaseRequest(other, EPOCH)]


async def test_a_request_waits_for_an_adapter_that_is_being_loaded_to_be_kept() -> None:
    async with bench() as b:
        kept = DIGESTS[0]
        assert await b.tell(KeepLoaded((kept,))) == [kept]
        assert await b.tell(Pin(kept, EPOCH)) == []
        await b.tell(AdapterLoaded(kept, True))
        assert b.queue_of(kept).take() == [Pinned(kept, EPOCH)]


async def test_an_adapter_that_cannot_be_kept_loaded_is_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bench() as b:
        await b.tell(KeepLoaded((DIGESTS[0],)), AdapterLoaded(DIGESTS[0], False, "too large"))
        assert f"{DIGESTS[0][:12]} cannot be kept loaded: too large" in caplog.text
        assert await b.tell(Pin(DIGESTS[0], EPOCH)) == [DIGESTS[0]]
