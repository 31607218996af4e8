"""The pool gives every adapter its slot and its true rank's pages, and takes them back whatever the order."""

import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_pools import CPU, SHAPES, adapter_of, assert_holds, make_pool

from personae.errors import AdapterError, Overloaded
from personae.kernels.sgmv import RANK_PAGE
from personae.lora.adapter import Adapter, LoraPair, make_adapter
from personae.lora.pool import LoraPool
from personae.lora.shapes import LoraShapes
from personae.lora.sites import sites
from personae.lora.weight_pools import pool_bytes


def test_an_adapter_occupies_the_pages_of_its_true_rank() -> None:
    pool = make_pool()
    adapter = adapter_of(1, {"q": 1, "v": 8, "down": 13})
    pool.load(adapter)
    free = {module: pool.num_pages - len(pool._pages.free[module]) for module in SHAPES.modules}
    assert free == {"q": 1, "k": 0, "v": 1, "o": 0, "gate": 0, "up": 0, "down": 2}
    assert_holds(pool, adapter)
    pool.check_integrity()


def test_a_layer_of_smaller_rank_is_filled_up_with_zeros() -> None:
    pool = make_pool()
    old, new = adapter_of(1, {"q": 16, "o": 16}), adapter_of(2, {"q": (3, 11), "o": (0, 9)})
    pool.load(old)
    pool.unload(old.digest)
    pool.load(new)
    assert new.ranks == {"q": 11, "o": 9}
    assert_holds(pool, new)


def test_rows_past_the_rank_in_the_last_page_are_zero() -> None:
    pool = make_pool(capacity_rows=RANK_PAGE)
    pool.load(old := adapter_of(1, {"q": 8}))
    pool.unload(old.digest)
    pool.load(adapter_of(2, {"q": 3}))
    for layer in range(SHAPES.layers):
        weight_pool = pool.weight_pools["qkv"][layer][0]
        assert weight_pool.a[:3].all()
        assert not weight_pool.a[3:].any()
        assert not weight_pool.b[3:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_scaling_is_folded_in_float32_before_the_one_rounding(
    dtype: torch.dtype, given: torch.dtype
) -> None:
    pool = make_pool(dtype=dtype)
    adapter = adapter_of(1, {"q": 5, "down": 4}, scaling=1 / 3, dtype=given)
    pool.load(adapter)
    assert_holds(pool, adapter)


def test_a_value_out_of_the_pool_s_range_is_refused() -> None:
    adapter = adapter_of(1, {"q": 2}, scaling=1e6)
    with pytest.raises(AdapterError, match="outside the range of the server"):
        make_pool(dtype=torch.float16).load(adapter)
    make_pool(dtype=torch.bfloat16).load(adapter)


def test_loading_twice_is_loading_once() -> None:
    pool = make_pool()
    slot = pool.load(adapter_of(1, {"q": 8}))
    assert pool.load(adapter_of(1, {"q": 8})) == slot
    assert len(pool._pages.free["q"]) == pool.num_pages - 1


def test_the_least_recently_used_leaves_first() -> None:
    pool = make_pool(max_adapters=3)
    a, b, c, d, e = (adapter_of(seed, {"q": 8}) for seed in range(5))
    for adapter in (a, b, c):
        pool.load(adapter)
    pool.load(a)  # used again
    pool.pin(b.digest)  # which uses it, too
    pool.load(d)
    assert pool.residents == (a.digest, b.digest, d.digest)
    pool.unpin(b.digest)  # and so does this
    pool.load(e)
    assert pool.residents == (d.digest, b.digest, e.digest)
    pool.check_integrity()


def test_only_adapters_whose_memory_is_needed_leave() -> None:
    pool = make_pool(capacity_rows=16)
    mlp, attention = adapter_of(1, {"up": 16}), adapter_of(2, {"q": 16})
    pool.load(mlp)
    pool.load(attention)
    pool.load(adapter_of(3, {"q": 8}))
    assert mlp.digest in pool.residents
    assert attention.digest not in pool.residents


def test_a_pinned_adapter_stays_and_a_refused_load_changes_nothing() -> None:
    pool = make_pool(capacity_rows=32)
    held, idle, big = adapter_of(1, {"q": 16}), adapter_of(2, {"q": 16}), adapter_of(3, {"q": 32})
    pool.load(held)
    pool.load(idle)
    pool.pin(held.digest)
    with pytest.raises(Overloaded, match="in use"):
        pool.load(big)
    assert set(pool.residents) == {held.digest, idle.digest}
    with pytest.raises(ValueError, match="pinned"):
        pool.unload(held.digest)
    pool.unpin(held.digest)
    pool.load(big)
    assert pool.residents == (big.digest,)
    assert_holds(pool, big)


def test_pins_are_counted() -> None:
    pool = make_pool()
    adapter = adapter_of(1, {"q": 8})
    slot = pool.load(adapter)
    assert pool.pin(adapter.digest) == pool.pin(adapter.digest) == slot
    pool.unpin(adapter.digest)
    assert pool.pins(adapter.digest) == 1
    pool.unpin(adapter.digest)
    with pytest.raises(ValueError, match="not pinned"):
        pool.unpin(adapter.digest)
    pool.unload(adapter.digest)
    assert pool.slot(adapter.digest) is None
    with pytest.raises(KeyError):
        pool.pin(adapter.digest)


def test_an_adapter_that_can_never_fit_is_refused_with_its_rank() -> None:
    pool = make_pool(capacity_rows=16)
    adapter = adapter_of(1, {"v": 17})
    with pytest.raises(AdapterError, match="rank 17 of v: the memory for adapters holds 16 ranks"):
        pool.load(adapter)


def test_no_adapter_is_larger_than_the_kernels_scratch_memory_however_large_the_pool() -> None:
    pool = make_pool(capacity_rows=1024)
    pool.load(adapter_of(1, {"k": 512}))
    with pytest.raises(AdapterError, match="rank 513 of k: the largest supported rank is 512"):
        pool.load(adapter_of(2, {"k": 513}))
    pool.check_integrity()


@pytest.mark.parametrize(("rows", "slots"), [(0, 1), (12, 1), (8, 0)])
def test_a_pool_of_no_size_is_no_pool(rows: int, slots: int) -> None:
    with pytest.raises(ValueError, match="capacity_rows"):
        make_pool(capacity_rows=rows, max_adapters=slots)


def test_the_pool_takes_the_bytes_that_it_says() -> None:
    pool = make_pool(capacity_rows=128, dtype=torch.bfloat16)
    halves = [half.untyped_storage() for stack in pool.stacks.values() for half in (stack.a, stack.b)]
    assert pool_bytes(SHAPES, 128, torch.bfloat16) == sum(half.nbytes() for half in halves)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells a process's memory there")
def test_on_the_cpu_a_pool_takes_memory_for_what_has_been_in_it() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()

    shapes = LoraShapes(8, sites({"q": (512, 512)}))
    pair = LoraPair(torch.ones(8, 512), torch.ones(8, 512), 1.0)
    before = resident()
    pool = LoraPool(shapes, capacity_rows=2**13, max_adapters=4, dtype=torch.float32, device=CPU)
    for seed in range(4):
        pairs = {(layer, "q"): replace(pair, scaling=seed + 1.0) for layer in range(8)}
        pool.load(make_adapter(f"{seed}", pairs))
    assert pool_bytes(shapes, 2**13, torch.float32) == 2**28
    assert resident() - before < 2**26


def test_integrity_notices_what_does_not_add_up() -> None:
    pool = make_pool()
    adapter = adapter_of(1, {"q": 8})
    slot = pool.load(adapter)
    pool.tables["qkv"][0].rank[slot] = 7
    with pytest.raises(AssertionError, match="ranks of q"):
        pool.check_integrity()
    pool.tables["qkv"][0].rank[slot] = 8
    pool.tables["qkv"][0].pages[slot, 0] += 1
    with pytest.raises(AssertionError, match="page table of q"):
        pool.check_integrity()


def test_an_adapter_that_is_loaded_in_pieces_is_in_its_place_from_the_first_and_whole_after_the_last() -> (
    None
):
    pool = make_pool(capacity_rows=16, max_adapters=2)
    other, adapter = adapter_of(1, {"q": 8}), adapter_of(2, {"q": 8, "o": 3, "down": 5})
    pool.load(other)
    pieces = pool.loading(adapter)
    for _ in range(3 * SHAPES.layers * 2):  # a page of A and one of B for each module
        next(pieces)
        pool.check_integrity()
        assert pool.pins(adapter.digest) == 1
        with pytest.raises(Overloaded):  # it would have to leave
            pool.load(adapter_of(3, {"q": 16}))
    assert list(pieces) == []
    assert pool.pins(adapter.digest) == 0
    assert list(pool.loading(adapter)) == [], "it is there"
    whole = make_pool(capacity_rows=16, max_adapters=2)
    whole.load(other)
    assert whole.load(adapter) == pool.slot(adapter.digest)
    for group in ("qkv", "o", "down"):
        for mine, theirs in zip(pool.weight_pools[group][1], whole.weight_pools[group][1], strict=True):
            assert torch.equal(mine.a, theirs.a)
            assert torch.equal(mine.b, theirs.b)


def test_the_first_piece_of_what_finds_no_room_raises_and_nothing_has_changed() -> None:
    pool = make_pool(capacity_rows=8, max_adapters=1)
    pool.load(adapter_of(1, {"q": 8}))
    pool.pin(adapter_of(1, {"q": 8}).digest)
    with pytest.raises(Overloaded):
        next(pool.loading(adapter_of(2, {"q": 8})))
    pool.check_integrity()
    assert len(pool.residents) == 1


def test_an_adapter_may_come_while_memory_is_given_back() -> None:
    wide = LoraShapes(2, sites({"q": (4096, 4096), "v": (4096, 2048)}))

    def adapter(seed: int, rank: int) -> Adapter:
        random = torch.Generator().manual_seed(seed)
        pairs = {
            (layer, module): LoraPair(
                torch.randn(rank, width, generator=random), torch.randn(rank, out, generator=random), 1.0
            )
            for layer in range(2)
            for module, (width, out) in wide.modules.items()
        }
        return make_adapter(f"{seed}", pairs, digest=f"{seed}")

    pool = LoraPool(wide, capacity_rows=256, max_adapters=32, dtype=torch.float32, device=CPU, spare_rows=256)
    for seed in range(12):
        pool.load(adapter(seed, 8 * (1 + seed % 3)))
    for seed in range(0, 12, 2):
        pool.unload(f"{seed}")
    late = [adapter(seed, 16) for seed in range(20, 24)]
    loads = [pool.loading(each) for each in late]
    pieces = 0
    for _ in pool.unmapping():
        pieces += 1
        for load in loads[: 2 * pieces]:
            next(load, None)
    assert pieces > 2, "a group of a module each"
    for load in loads:
        for _ in load:
            pass
    for each in (*late, *(adapter(seed, 8 * (1 + seed % 3)) for seed in range(1, 12, 2))):
        slot = pool.slot(each.digest)
        assert slot is not None
        for (layer, module), pair in each.pairs.items():
            stack = pool.stacks[module]
            rows = stack.table.rows(slot)
            assert torch.equal(stack.a[layer][rows], pair.a)
            assert torch.equal(stack.b[layer][rows], pair.b)
    pool.check_integrity()


def test_one_module_may_have_all_memory_and_another_gets_it_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[int] = []
    monkeypatch.setattr(
        "personae.lora.weight_pools.RankPool._unmap_pages",
        lambda half, group, pages: given.append(len(pages)),
    )
    pool = make_pool(capacity_rows=16, max_adapters=64, spare_rows=240)
    of_q = [adapter_of(100 + seed, {"q": 16}) for seed in range(32)]
    for adapter in of_q:
        pool.load(adapter)
    assert len(pool.residents) > 2, "more than the 16 rows that each module has if all have the same"
    assert pool.evictions == len(of_q) - len(pool.residents) > 0
    assert not given, "its own pages are taken again"
    pool.load(adapter_of(200, {"down": 16}))
    assert given, "it is in pages that had no memory before"
    pool.check_integrity()
