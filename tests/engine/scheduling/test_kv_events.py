"""Events of the prefix cache: whoever hears them all knows what can be found."""

import random

import msgspec

from personae.engine.params import SamplingParams
from personae.engine.scheduling.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventRecorder,
)
from personae.engine.scheduling.page_names import block_names, root_key
from personae.engine.scheduling.pages import PagePool
from personae.engine.scheduling.prefix import PrefixCache
from personae.engine.sequence import SequenceLog

SIZE = 4


def log(tokens: list[int], **more: object) -> SequenceLog:
    return SequenceLog("a", tuple(tokens), len(tokens), SamplingParams(max_tokens=1, seed=0), **more)


class Cache:
    """A prefix cache that is listened to, and what a listener has made of it."""

    def __init__(self, pages: int = 8) -> None:
        self.cache = PrefixCache(PagePool(pages), SIZE)
        self.recorder = KVEventRecorder()
        self.cache.observer = self.recorder
        self.heard: set[int] = set()
        self.events: list[object] = []

    def compute(self, sequence: SequenceLog) -> None:
        """A sequence comes, and goes."""
        key = root_key(sequence.salt, sequence.adapter)
        hit = self.cache.match(key, (*sequence.tokens, 0))
        handle = self.cache.handle(key, hit, copy=False)
        pages = [node.page for node in hit.nodes]
        full = len(sequence.tokens) // SIZE
        pages += self.cache.allocate(handle, full - len(pages))
        for number in range(len(hit.nodes), full):
            self.cache.publish(handle, sequence.tokens[number * SIZE : (number + 1) * SIZE], pages[number])
        self.cache.release(handle, pages)
        for event in self.recorder.take():
            self.events.append(event)
            if isinstance(event, BlockStored):
                self.heard.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.heard.difference_update(event.block_hashes)


def test_what_was_heard_is_what_can_be_found() -> None:
    cache, dice = Cache(), random.Random(3)
    removed = False
    for _ in range(300):
        tokens = [dice.randrange(2) for _ in range(SIZE * dice.randrange(1, 6))]
        sequence = log(tokens, salt=dice.choice((b"ann", b"bob")), adapter=dice.choice((None, "d" * 64)))
        cache.compute(sequence)
        assert cache.heard == set(cache.recorder.names)
        assert set(block_names(sequence, SIZE)) <= cache.heard, "a client of the names finds its own"
        removed = removed or any(isinstance(event, BlockRemoved) for event in cache.events)
    assert removed, "the cache was full"


def test_names_differ_by_salt_and_adapter_and_all_tokens_before() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    names = {
        tuple(block_names(each, SIZE))
        for each in (
            log(tokens),
            log(tokens, salt=b"x"),
            log(tokens, adapter="d"),
            log(tokens, adapter="d", adapter_start=5),
            log([9, *tokens[1:]]),
        )
    }
    assert len({chain[0] for chain in names}) == 4, "an adapter that begins later has the base's first block"
    assert len({chain[1] for chain in names}) == 5


def test_blocks_that_follow_one_another_come_in_one_event_as_vllm_encodes_them() -> None:
    cache = Cache()
    cache.compute(log([1, 2, 3, 4, 5, 6, 7, 8], adapter="digest"))
    (event,) = cache.events
    first, second = block_names(log([1, 2, 3, 4, 5, 6, 7, 8], adapter="digest"), SIZE)
    assert msgspec.to_builtins(event) == [
        "BlockStored", [first, second], None, [1, 2, 3, 4, 5, 6, 7, 8], 4, None, None, "digest",
    ]  # fmt: skip
    assert msgspec.to_builtins(AllBlocksCleared()) == ["AllBlocksCleared"]
