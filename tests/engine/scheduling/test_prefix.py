"""The cache alone, driven by a small writer that computes prompts page by page."""

import pytest

from personae.engine.scheduling.page_names import root_key
from personae.engine.scheduling.pages import PagePool
from personae.engine.scheduling.prefix import MISS, CacheHandle, KeptPath, PrefixCache, PrefixHit

KEY = root_key(b"tenant", None)


class Writer:
    """Sequences that compute their whole prompt at once."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.pool = PagePool(pages)
        self.size = page_size
        self.cache = PrefixCache(self.pool, page_size)
        self.open: dict[CacheHandle, list[int]] = {}

    def write(self, tokens: list[int], key=KEY, weight: float = 1.0) -> CacheHandle:
        hit = self.cache.match(key, tuple(tokens))
        tenant = key[1].decode()
        handle = self.cache.handle(key, hit, copy=False, tenant=tenant, weight=weight)
        pages = [node.page for node in hit.nodes]
        pages += self.cache.allocate(handle, -(-len(tokens) // self.size) - len(pages))
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

    def put(self, tokens: list[int], key=KEY, weight: float = 1.0) -> list[int]:
        return self.close(self.write(tokens, key, weight))

    def put_kept(self, tokens: list[int], path: KeptPath) -> None:
        """As `put`, in a session."""
        handle = self.write(tokens)
        self.cache.keep(path, handle)
        self.close(handle)

    def take(self, count: int) -> None:
        """Pages for a sequence that is not complete yet."""
        handle = self.cache.handle(KEY, MISS, copy=False, tenant="tenant")
        self.open[handle] = self.cache.allocate(handle, count)

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
    writer.take(1)
    assert writer.match([3, 3, 0]).length == 0
    assert writer.match([1, 1, 2, 2, 0]).length == 4
    writer.take(1)
    assert writer.match([4, 4, 0]).length == 0
    writer.take(1)
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
        writer.open[handle] = writer.cache.allocate(handle, 2)
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
    writer.open[first] = writer.cache.allocate(first, 1)
    writer.open[second] = writer.cache.allocate(second, 2)
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
    writer.take(2)
    writer.check()
    empty = writer.cache.handle(KEY, writer.match([5, 5]), copy=False)
    writer.cache.release(empty, [])
    for handle in list(writer.open):
        writer.close(handle)
    assert not writer.cache._roots
    assert not writer.cache._tenants


def test_a_pinned_source_survives_the_eviction_that_its_copy_causes():
    writer = Writer(2, 2)
    writer.put([1, 2])
    hit = writer.match([1, 3])
    handle = writer.cache.handle(KEY, hit, copy=True)
    assert not writer.cache.can_allocate(2)
    assert hit.source is not None
    (target,) = writer.cache.allocate(handle, 1)
    assert target != hit.source.page
    writer.cache.unpin(hit.source)
    writer.open[handle] = [target]
    writer.close(handle)


def _fill(writer: Writer, key, first: int, pages: int, weight: float = 1.0) -> None:
    """Prompts of one page, one after the other."""
    for number in range(first, first + pages):
        writer.put([number, number], key, weight)


def _found(writer: Writer, key, first: int, pages: int) -> int:
    return sum(writer.match([n, n, 0], key).length == 2 for n in range(first, first + pages))


ANN, BOB, CAT = (root_key(name, None) for name in (b"ann", b"bob", b"cat"))


def test_a_tenant_that_floods_the_cache_evicts_no_page_of_one_within_its_share():
    writer = Writer(12, 2)
    _fill(writer, ANN, 0, 4)
    _fill(writer, BOB, 0, 100)
    assert _found(writer, ANN, 0, 4) == 4
    assert _found(writer, BOB, 92, 8) == 8
    _fill(writer, CAT, 0, 4)
    assert [_found(writer, ANN, 0, 4), _found(writer, BOB, 96, 4), _found(writer, CAT, 0, 4)] == [4, 4, 4]


def test_a_tenants_share_of_the_cache_is_by_weight():
    writer = Writer(12, 2)
    _fill(writer, ANN, 0, 12, weight=3.0)
    _fill(writer, BOB, 0, 12)
    assert (_found(writer, ANN, 3, 9), _found(writer, BOB, 9, 3)) == (9, 3)


def test_a_tenant_alone_has_the_whole_cache():
    writer = Writer(12, 2)
    _fill(writer, ANN, 0, 12)
    assert _found(writer, ANN, 0, 12) == 12


def test_pages_of_a_session_are_evicted_after_the_tenants_others():
    writer, path = Writer(6, 2), KeptPath()
    writer.put_kept([1, 1, 2, 2], path)
    _fill(writer, KEY, 10, 20)
    assert writer.match([1, 1, 2, 2, 0]).length == 4
    assert writer.cache.kept == 2
    writer.cache.unkeep(path)
    writer.check()
    _fill(writer, KEY, 30, 6)
    assert writer.match([1, 1, 2, 2, 0]).length == 0


def test_pages_of_a_session_do_not_enlarge_its_tenants_share():
    writer, path = Writer(6, 2), KeptPath()
    writer.put_kept([1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6], path)
    _fill(writer, BOB, 0, 6)
    assert writer.match([1, 1, 2, 2, 3, 3, 4, 4, 0]).length == 6
    assert writer.cache.kept == 3
    assert _found(writer, BOB, 3, 3) == 3
    writer.cache.unkeep(path)
    assert not writer.cache.kept


def test_the_next_turn_of_a_session_keeps_its_own_pages_instead():
    writer, one, other = Writer(8, 2), KeptPath(), KeptPath()
    writer.put_kept([1, 1, 2, 2], one)
    writer.put_kept([1, 1, 3, 3], other)
    assert writer.cache.kept == 3
    writer.put_kept([1, 1, 4, 4, 5, 5], one)
    assert writer.cache.kept == 4
    _fill(writer, KEY, 10, 8)
    assert writer.match([1, 1, 2, 2, 0]).length == 2
    writer.cache.unkeep(one)
    writer.cache.unkeep(other)
    writer.check()
    assert not writer.cache.kept


def test_memory_lent_to_adapters_comes_from_the_pages_of_sessions_last():
    writer, path = Writer(8, 2), KeptPath()
    writer.put([0, 0, 0, 0])
    writer.put_kept([1, 1, 2, 2], path)
    _fill(writer, KEY, 10, 4)
    assert writer.cache.take_runs(2, 2) == [4, 5, 6, 7]
    assert writer.match([1, 1, 2, 2, 0]).length == 4
    writer.cache.take_runs(1, 2)
    assert writer.match([1, 1, 2, 2, 0]).length == 0
