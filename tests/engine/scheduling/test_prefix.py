"""The cache alone, driven by a small writer that computes prompts page by page."""

import pytest

from personae.engine.scheduling.page_names import root_key
from personae.engine.scheduling.pages import PagePool
from personae.engine.scheduling.prefix import CacheHandle, PrefixCache, PrefixHit

KEY = root_key(b"tenant", None)


class Writer:
    """Sequences that compute their whole prompt at once."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.pool = PagePool(pages)
        self.size = page_size
        self.cache = PrefixCache(self.pool, page_size)
        self.open: dict[CacheHandle, list[int]] = {}

    def write(self, tokens: list[int], key=KEY) -> CacheHandle:
        hit = self.cache.match(key, tuple(tokens))
        handle = self.cache.handle(key, hit, copy=False)
        pages = [node.page for node in hit.nodes]
        pages += self.cache.allocate(-(-len(tokens) // self.size) - len(pages))
        for i in range(len(handle.nodes), len(tokens) // self.size):
            self.cache.publish(handle, tuple(tokens[i * self.size : (i + 1) * self.size]), pages[i])
        self.open[handle] = pages
        self.check()
        return handle

    def close(self, handle: CacheHandle, keep: bool = True) -> list[int]:
        pages = self.open.pop(handle)
        self.cache.release(handle, pages, keep=keep)
        self.check()
        return pages

    def put(self, tokens: list[int], key=KEY) -> list[int]:
        return self.close(self.write(tokens, key))

    def match(self, tokens: list[int], key=KEY) -> PrefixHit:
        return self.cache.match(key, tuple(tokens))

    def check(self) -> None:
        self.cache.check_integrity(list(self.open), [page for pages in self.open.values() for page in pages])


def test_full_pages_are_found_again():
    writer = Writer(8, 4)
    pages = writer.put(list(range(10)))
    hit = writer.match([*range(8), 90, 91])
    assert [node.page for node in hit.nodes] == pages[:2]
    assert hit.length == 8
    assert hit.source is None


def test_a_page_that_is_not_full_is_not_found():
    writer = Writer(8, 4)
    writer.put([1, 2, 3])
    assert writer.match([1, 2, 3, 4]).length == 0


def test_a_hit_inside_a_page_names_the_page_to_copy_and_how_much_of_it():
    writer = Writer(8, 4)
    pages = writer.put([1, 2, 3, 4, 5, 6, 7, 8])
    hit = writer.match([1, 2, 3, 4, 5, 6, 99, 99])
    assert [node.page for node in hit.nodes] == pages[:1]
    assert hit.source is not None
    assert hit.source.page == pages[1]
    assert (hit.partial, hit.length) == (2, 6)


def test_of_several_children_the_one_that_agrees_longest_is_copied():
    writer = Writer(8, 4)
    writer.put([1, 2, 0, 0])
    (best,) = writer.put([1, 2, 3, 0])
    writer.put([1, 0, 0, 0])
    hit = writer.match([1, 2, 3, 4, 5])
    assert hit.source is not None
    assert (hit.source.page, hit.partial) == (best, 3)


def test_the_last_token_is_never_taken_from_the_cache():
    writer = Writer(8, 4)
    pages = writer.put(list(range(8)))
    hit = writer.match(list(range(8)))
    assert [node.page for node in hit.nodes] == pages[:1]
    assert hit.source is not None
    assert hit.source.page == pages[1]
    assert hit.length == 7


def test_a_page_of_one_token_is_never_copied():
    writer = Writer(8, 1)
    writer.put([1, 2, 3])
    hit = writer.match([1, 2, 3])
    assert (len(hit.nodes), hit.source, hit.length) == (2, None, 2)


@pytest.mark.parametrize(
    "other",
    [root_key(b"another", None), root_key(b"tenant", "digest"), root_key(b"tenantdigest", None)],
    ids=["another tenant", "an adapter", "a salt that ends like the adapter"],
)
def test_another_key_never_hits_in_either_direction(other):
    writer = Writer(16, 4)
    tokens = list(range(12))
    writer.put(tokens)
    assert writer.match(tokens, other).length == 0
    mine = writer.put(tokens, other)
    assert [node.page for node in writer.match(tokens, other).nodes] == mine[:2]
    assert not {node.page for node in writer.match(tokens).nodes} & set(mine)


def test_the_least_recently_used_leaf_is_evicted_first():
    writer = Writer(4, 2)
    writer.put([1, 1, 2, 2])  # a chain of two pages
    writer.put([3, 3])
    writer.put([4, 4])
    writer.put([1, 1, 2, 2])  # used again
    assert writer.cache.available == 4
    writer.cache.allocate(1)
    assert writer.match([3, 3, 0]).length == 0
    assert writer.match([1, 1, 2, 2, 0]).length == 4
    writer.cache.allocate(1)
    assert writer.match([4, 4, 0]).length == 0
    writer.cache.allocate(1)
    assert writer.match([1, 1, 2, 2, 0]).length == 2, "the end of a chain goes before its beginning"


def test_leased_pages_are_not_evicted():
    writer = Writer(2, 2)
    handle = writer.write([1, 1, 2, 2])
    assert not writer.cache.can_allocate(1)
    writer.close(handle)
    assert writer.cache.can_allocate(2)


def test_the_same_tokens_computed_twice_leave_one_copy():
    writer = Writer(4, 2)
    first = writer.cache.handle(KEY, writer.match([1, 1, 0]), copy=False)
    second = writer.cache.handle(KEY, writer.match([1, 1, 0]), copy=False)
    for handle in (first, second):
        writer.open[handle] = writer.cache.allocate(2)
        writer.cache.publish(handle, (1, 1), writer.open[handle][0])
    writer.check()
    writer.close(first)
    writer.close(second)
    assert writer.pool.free == 3
    assert writer.cache.available == 4


def test_a_child_of_a_duplicate_keeps_its_parent():
    """The second sequence's first page is private, its second hangs under the first sequence's node."""
    writer = Writer(4, 2)
    first = writer.cache.handle(KEY, writer.match([1, 1, 0]), copy=False)
    second = writer.cache.handle(KEY, writer.match([1, 1, 0]), copy=False)
    writer.open[first] = writer.cache.allocate(1)
    writer.open[second] = writer.cache.allocate(2)
    writer.cache.publish(first, (1, 1), writer.open[first][0])
    writer.cache.publish(second, (1, 1), writer.open[second][0])
    writer.cache.publish(second, (2, 2), writer.open[second][1])
    writer.close(first)
    assert writer.cache.available == 1, "the first page is leased through its child"
    writer.close(second)
    assert writer.match([1, 1, 2, 2, 0]).length == 4


def test_what_failed_is_not_kept_unless_others_hold_it():
    writer = Writer(8, 2)
    good = writer.write([1, 1])
    bad = writer.write([1, 1, 2, 2])
    writer.close(bad, keep=False)
    assert writer.match([1, 1, 2, 2, 0]).length == 2
    writer.close(good)
    assert writer.cache.available == 8


def test_nothing_is_left_of_a_key_without_pages():
    writer = Writer(2, 2)
    writer.put([1, 1, 2, 2])
    writer.cache.allocate(2)
    writer.cache.check_integrity([], [0, 1])
    empty = writer.cache.handle(KEY, writer.match([5, 5]), copy=False)
    writer.cache.release(empty, [])
    writer.cache.check_integrity([], [0, 1])


def test_a_pinned_source_survives_the_eviction_that_its_copy_causes():
    writer = Writer(2, 2)
    writer.put([1, 2])
    hit = writer.match([1, 3])
    handle = writer.cache.handle(KEY, hit, copy=True)
    assert not writer.cache.can_allocate(2)
    assert hit.source is not None
    (target,) = writer.cache.allocate(1)
    assert target != hit.source.page
    writer.cache.unpin(hit.source)
    writer.open[handle] = [target]
    writer.close(handle)
