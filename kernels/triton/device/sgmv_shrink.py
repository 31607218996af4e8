"""Shrink: x times the adapters' A, for all modules that read x; see sgmv_plan."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from personae.kernels.triton.device.sgmv_plan import PAGE, find, load_plan, pages_of


@triton.jit
def _shrink_rows(
    x_row,
    a_row,
    plane,
    rows,
    x_stride,
    plane_stride,
    k_first,
    k_last,
    live,
    listed,
    RANKS: tl.constexpr,
    VECTOR_K: tl.constexpr,
):
    """For few rows: one product per row. From the second row on, A comes from the L1 cache."""
    for _ in range(rows):
        dots = tl.zeros([RANKS], tl.float32)
        for k in range(k_first, k_last, VECTOR_K):
            ks = k + tl.arange(0, VECTOR_K)
            inside = ks < k_last
            a = tl.load(a_row[:, None] + ks[None, :], mask=live[:, None] & inside[None, :], other=0.0)
            x = tl.load(x_row + ks, mask=inside, other=0.0)
            dots += tl.sum(a.to(tl.float32) * x.to(tl.float32)[None, :], 1)
        tl.store(plane, dots, mask=listed)
        x_row += x_stride
        plane += plane_stride


@triton.jit
def _shrink_tile(
    x_rows,
    a_row,
    k_first,
    k_last,
    own,
    live,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of rows, on tensor cores."""
    acc = tl.zeros([ROWS, RANKS], tl.float32)
    for k in range(k_first, k_last, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        inside = ks < k_last
        x = tl.load(x_rows[:, None] + ks[None, :], mask=own[:, None] & inside[None, :], other=0.0)
        a = tl.load(a_row[None, :] + ks[:, None], mask=live[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(x, a, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["tokens", "width", "segments"])
def shrink_kernel(
    x_ptr,
    a0_ptr,
    a1_ptr,
    a2_ptr,
    planes_ptr,
    first_ptr,
    rows_ptr,
    ends_ptr,
    ranks_ptr,
    pages_ptr,
    tokens,
    inputs,
    x_stride,
    width,
    segments,
    split_k,
    MODULES: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR_K: tl.constexpr,
    VECTOR_ROWS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """planes[split, row, c] = sum of x[row, k] A[c, k] over the split's k; see sgmv_plan.

    planes: [SPLITS, tokens, width * 8] float32, written only for the segments' rows and true pages. EARLY:
    expand may begin before this ends; see `expand_kernel`.
    """
    if EARLY:
        gdc_launch_dependents()
    each = tl.arange(0, SEGMENTS)
    ends = load_plan(ends_ptr + each, each < segments, 2147483647)
    total = load_plan(ends_ptr + segments - 1)
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        segment, local = find(ends, item)
        first = load_plan(first_ptr + segment).to(tl.int64)
        rows = load_plan(rows_ptr + segment)

        rank = load_plan(ranks_ptr + segment * 4)
        second = pages_of(rank) * PAGE  # the second module's first column
        columns = second
        if MODULES > 1:
            rank1 = load_plan(ranks_ptr + segment * 4 + 1)
            third = second + pages_of(rank1) * PAGE
            columns = third
        if MODULES > 2:
            rank2 = load_plan(ranks_ptr + segment * 4 + 2)
            columns += pages_of(rank2) * PAGE
        groups = (columns + RANKS - 1) // RANKS
        group = local % groups
        split = (local // groups) % SPLITS
        tile = local // (groups * SPLITS)

        # The item's columns on the axis of all modules' ranks: which module's A they read, and which rows.
        c = group * RANKS + tl.arange(0, RANKS)
        listed = c < columns
        page = load_plan(pages_ptr + segment * width + c // PAGE, listed, 0)
        base = tl.where(c >= 0, a0_ptr, a0_ptr)
        live = c < rank
        if MODULES > 1:
            base = tl.where(c >= second, a1_ptr, base)
            live = tl.where(c >= second, c - second < rank1, live)
        if MODULES > 2:
            base = tl.where(c >= third, a2_ptr, base)
            live = tl.where(c >= third, c - third < rank2, live)
        a_row = base + (page * PAGE + c % PAGE).to(tl.int64) * inputs
        if ALIGNED:
            a_row = tl.multiple_of(a_row, 16)

        k_first = split * split_k
        k_last = tl.minimum(k_first + split_k, inputs)
        plane = planes_ptr + split.to(tl.int64) * tokens * width * PAGE
        stride = width * PAGE
        if rows <= VECTOR_ROWS:
            x_row = x_ptr + first * x_stride
            dots = plane + first * stride + c
            _shrink_rows(
                x_row, a_row, dots, rows, x_stride, stride, k_first, k_last, live, listed, RANKS, VECTOR_K
            )
        else:
            i = tile * ROWS + tl.arange(0, ROWS)
            own = i < rows
            x_rows = x_ptr + (first + i) * x_stride
            where = plane + (first + i)[:, None] * stride + c[None, :]
            acc = _shrink_tile(x_rows, a_row, k_first, k_last, own, live, ROWS, RANKS, BLOCK_K)
            tl.store(where, acc, mask=own[:, None] & listed[None, :])
