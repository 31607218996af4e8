"""SGMV on the device: one small plan kernel per step, then shrink and expand per layer.

A segment is a run of rows that take one adapter. An adapter's ranks of all modules that read the same x lie
one after the other on one axis, in whole pages of 8 ranks: q's pages, then k's, then v's. Shrink sees only
this axis. So one launch serves all modules, and an item of work is never larger than the true ranks need.

    shrink   planes[split, row, c] = sum over k in split of x[row, k] A[c, k]
    expand   y_m[row, o] += sum_c (sum_split planes[split, row, c]) B_m[c, o]

Work is cut into items, numbered from 0. `ends` holds the running count of items up to each segment, so the
segment of an item is the number of ends at or below it. A fixed grid of programs takes items in turn.
"""

import triton
import triton.language as tl

PAGE = tl.constexpr(8)


@triton.jit
def pages_of(rank):
    """The number of whole pages that hold `rank` ranks."""
    return (rank + PAGE - 1) // PAGE


@triton.jit
def _list_pages(
    slot,
    rank0_ptr,
    rank1_ptr,
    rank2_ptr,
    pages0_ptr,
    pages1_ptr,
    pages2_ptr,
    pages0_stride,
    pages1_stride,
    pages2_stride,
    ranks_ptr,
    pages_ptr,
    MODULES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Copies a slot's ranks and pages, one module after the other."""
    for m in tl.static_range(MODULES):
        rank_ptr = rank0_ptr if m == 0 else (rank1_ptr if m == 1 else rank2_ptr)
        table_ptr = pages0_ptr if m == 0 else (pages1_ptr if m == 1 else pages2_ptr)
        stride = pages0_stride if m == 0 else (pages1_stride if m == 1 else pages2_stride)
        rank = tl.load(rank_ptr + slot)
        tl.store(ranks_ptr + m, rank)
        count = pages_of(rank)
        for first in range(0, count, CHUNK):
            page = first + tl.arange(0, CHUNK)
            inside = page < count
            ids = tl.load(table_ptr + slot * stride + page, mask=inside, other=0)
            tl.store(pages_ptr + page, ids, mask=inside)
        pages_ptr += count


@triton.jit
def _count_items(
    rows_ptr,
    adapter_ptr,
    rank0_ptr,
    rank1_ptr,
    rank2_ptr,
    blocks0,
    blocks1,
    blocks2,
    ends_ptr,
    segments,
    MODULES: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """The running counts of items up to each segment."""
    each = tl.arange(0, SEGMENTS)
    live = each < segments
    slot = tl.load(adapter_ptr + each, mask=live, other=0)
    rows = tl.load(rows_ptr + each, mask=live, other=0)
    tiles = (rows + ROWS - 1) // ROWS
    pages = tl.zeros([SEGMENTS], tl.int32)
    blocks = tl.zeros([SEGMENTS], tl.int32)
    for m in tl.static_range(MODULES):
        rank_ptr = rank0_ptr if m == 0 else (rank1_ptr if m == 1 else rank2_ptr)
        wide = blocks0 if m == 0 else (blocks1 if m == 1 else blocks2)
        rank = tl.load(rank_ptr + slot, mask=live & (rows > 0), other=0)
        pages += pages_of(rank)
        blocks += tl.where(rank > 0, wide, 0)
    groups = (pages * PAGE + RANKS - 1) // RANKS
    tl.store(ends_ptr + each, tl.cumsum(tiles * groups * SPLITS, 0), mask=live)
    tl.store(ends_ptr + segments + each, tl.cumsum(tiles * blocks, 0), mask=live)


@triton.jit(do_not_specialize=["segments", "width"])
def plan_kernel(
    rows_ptr,
    adapter_ptr,
    rank0_ptr,
    rank1_ptr,
    rank2_ptr,
    pages0_ptr,
    pages1_ptr,
    pages2_ptr,
    ends_ptr,
    ranks_ptr,
    pages_ptr,
    pages0_stride,
    pages1_stride,
    pages2_stride,
    blocks0,
    blocks1,
    blocks2,
    segments,
    width,
    MODULES: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Makes the plan that a step's layers share. Program i < segments lists segment i's pages, the last one
    counts.

    ends [2, segments]: running counts of shrink items and of expand items. ranks [segments, 4]: true rank by
    module. pages [segments, width]: pool pages of all modules' ranks, one module after the other.
    """
    segment = tl.program_id(0)
    if segment < segments:
        _list_pages(
            tl.load(adapter_ptr + segment),
            rank0_ptr,
            rank1_ptr,
            rank2_ptr,
            pages0_ptr,
            pages1_ptr,
            pages2_ptr,
            pages0_stride,
            pages1_stride,
            pages2_stride,
            ranks_ptr + segment * 4,
            pages_ptr + segment * width,
            MODULES,
            CHUNK,
        )
    else:
        _count_items(
            rows_ptr,
            adapter_ptr,
            rank0_ptr,
            rank1_ptr,
            rank2_ptr,
            blocks0,
            blocks1,
            blocks2,
            ends_ptr,
            segments,
            MODULES,
            SPLITS,
            ROWS,
            RANKS,
            SEGMENTS,
        )


@triton.jit
def find(ends, item):
    """The segment of an item, and the item's number within it."""
    before = ends <= item
    return tl.sum(before.to(tl.int32), 0), item - tl.max(tl.where(before, ends, 0), 0)


@triton.jit
def load_plan(pointers, mask=None, other=None):
    """Reads the plan. All layers of a step read it, so it should stay in the cache longer than a layer's
    weights."""
    return tl.load(pointers, mask=mask, other=other, eviction_policy="evict_last")
