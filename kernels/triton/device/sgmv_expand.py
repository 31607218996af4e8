"""Expand: the shrunk rows times the adapters' B, added to y; see sgmv_plan."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from personae.kernels.triton.device.sgmv_plan import PAGE, find, load_plan, pages_of


@triton.jit
def _sum_planes(pointers, mask, plane_stride, SPLITS: tl.constexpr, EARLY: tl.constexpr):
    """The sum over the splits, always in the same order."""
    if EARLY:
        gdc_wait()
    total = tl.load(pointers, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(pointers + split * plane_stride, mask=mask, other=0.0)
    return total


@triton.jit
def _b_rows(b_ptr, pages, r, rank, out, RANKS: tl.constexpr):
    """Where the rows of B^T from rank r on begin, which of them exist, and their numbers."""
    rs = r + tl.arange(0, RANKS)
    live = rs < rank
    page = load_plan(pages + rs // PAGE, live, 0)
    return b_ptr + (page * PAGE + rs % PAGE).to(tl.int64) * out, live, rs


@triton.jit
def _expand_row(
    s_ptr,
    b_ptr,
    pages,
    rank,
    o,
    within,
    out,
    plane_stride,
    SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One row's sum over its ranks, [BLOCK_OUT]."""
    sums = tl.zeros([RANKS, BLOCK_OUT], tl.float32)
    for r in range(0, rank, RANKS):
        b_row, live, rs = _b_rows(b_ptr, pages, r, rank, out, RANKS)
        b = tl.load(b_row[:, None] + o[None, :], mask=live[:, None] & within[None, :], other=0.0)
        s = _sum_planes(s_ptr + rs, live, plane_stride, SPLITS, EARLY)
        sums += s[:, None] * b.to(tl.float32)
    return tl.sum(sums, 0)


@triton.jit
def _expand_tile(
    s_rows,
    b_ptr,
    pages,
    rank,
    own,
    o,
    within,
    out,
    plane_stride,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A tile of rows, on tensor cores, [ROWS, BLOCK_OUT]."""
    acc = tl.zeros([ROWS, BLOCK_OUT], tl.float32)
    for r in range(0, rank, RANKS):
        b_row, live, rs = _b_rows(b_ptr, pages, r, rank, out, RANKS)
        b = tl.load(b_row[:, None] + o[None, :], mask=live[:, None] & within[None, :], other=0.0)
        inside = own[:, None] & live[None, :]
        s = _sum_planes(s_rows[:, None] + rs[None, :], inside, plane_stride, SPLITS, EARLY)
        high = s.to(b.dtype)
        acc = tl.dot(high, b, acc, input_precision="ieee")
        if b.dtype != tl.float32:
            acc = tl.dot((s - high.to(tl.float32)).to(b.dtype), b, acc)
    return acc


@triton.jit(do_not_specialize=["tokens", "width", "segments"])
def expand_kernel(
    planes_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    y0_ptr,
    y1_ptr,
    y2_ptr,
    first_ptr,
    rows_ptr,
    ends_ptr,
    ranks_ptr,
    pages_ptr,
    tokens,
    y0_stride,
    y1_stride,
    y2_stride,
    out0,
    out1,
    out2,
    width,
    segments,
    MODULES: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    VECTOR_RANKS: tl.constexpr,
    VECTOR_ROWS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """y_m[row, o] += sum_c s[row, c] B_m[c, o], s the sum of shrink's planes; y is rounded once.

    In half precision the tensor cores take s as the sum of two values of y's type, which keep at least 16 of
    its 24 bits. EARLY: expand begins during shrink (programmatic dependent launch), and waits for shrink's
    end before it reads the planes.
    """
    each = tl.arange(0, SEGMENTS)
    ends = load_plan(ends_ptr + segments + each, each < segments, 2147483647)
    total = load_plan(ends_ptr + 2 * segments - 1)
    plane_stride = tokens.to(tl.int64) * width * PAGE
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        segment, local = find(ends, item)
        first = load_plan(first_ptr + segment).to(tl.int64)
        rows = load_plan(rows_ptr + segment)

        # Find the module of this block of outputs. A module of rank 0 has no blocks.
        rank = load_plan(ranks_ptr + segment * 4)
        b_ptr, y_ptr, y_stride, out = b0_ptr, y0_ptr, y0_stride, out0
        page_first = 0  # the module's first page on the axis of all ranks
        block_first = 0
        blocks = tl.where(rank > 0, tl.cdiv(out0, BLOCK_OUT), 0)
        if MODULES > 1:
            rank1 = load_plan(ranks_ptr + segment * 4 + 1)
            blocks1 = tl.where(rank1 > 0, tl.cdiv(out1, BLOCK_OUT), 0)
        if MODULES > 2:
            rank2 = load_plan(ranks_ptr + segment * 4 + 2)
            blocks2 = tl.where(rank2 > 0, tl.cdiv(out2, BLOCK_OUT), 0)
        blocks_of = blocks
        if MODULES > 1:
            blocks_of += blocks1
        if MODULES > 2:
            blocks_of += blocks2
        tile = local // blocks_of
        block = local % blocks_of
        if MODULES > 2:
            third = block >= blocks + blocks1
            page2 = pages_of(rank) + pages_of(rank1)
        if MODULES > 1:
            second = block >= blocks
            page_first = tl.where(second, pages_of(rank), page_first)
            block_first = tl.where(second, blocks, block_first)
            b_ptr = tl.where(second, b1_ptr, b_ptr)
            y_ptr = tl.where(second, y1_ptr, y_ptr)
            y_stride = tl.where(second, y1_stride, y_stride)
            out = tl.where(second, out1, out)
            rank = tl.where(second, rank1, rank)
        if MODULES > 2:
            page_first = tl.where(third, page2, page_first)
            block_first = tl.where(third, blocks + blocks1, block_first)
            b_ptr = tl.where(third, b2_ptr, b_ptr)
            y_ptr = tl.where(third, y2_ptr, y_ptr)
            y_stride = tl.where(third, y2_stride, y_stride)
            out = tl.where(third, out2, out)
            rank = tl.where(third, rank2, rank)

        o = (block - block_first) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        within = o < out
        pages = pages_ptr + segment * width + page_first
        s_ptr = planes_ptr + page_first * PAGE
        stride = width * PAGE
        s_ptr += first * stride
        y_ptr += first * y_stride + o
        if rows <= VECTOR_ROWS:
            for _ in range(rows):
                y = tl.load(y_ptr, mask=within, other=0.0)
                sums = _expand_row(
                    s_ptr,
                    b_ptr,
                    pages,
                    rank,
                    o,
                    within,
                    out,
                    plane_stride,
                    SPLITS,
                    VECTOR_RANKS,
                    BLOCK_OUT,
                    EARLY,
                )
                tl.store(y_ptr, (y.to(tl.float32) + sums).to(y.dtype), mask=within)
                s_ptr += stride
                y_ptr += y_stride
        else:
            i = tile * ROWS + tl.arange(0, ROWS)
            own = i < rows
            s_rows = s_ptr + i.to(tl.int64) * stride
            acc = _expand_tile(
                s_rows,
                b_ptr,
                pages,
                rank,
                own,
                o,
                within,
                out,
                plane_stride,
                SPLITS,
                ROWS,
                RANKS,
                BLOCK_OUT,
                EARLY,
            )
            where = y_ptr[None, :] + i.to(tl.int64)[:, None] * y_stride
            inside = own[:, None] & within[None, :]
            tile_y = tl.load(where, mask=inside, other=0.0)
            tl.store(where, (tile_y.to(tl.float32) + acc).to(tile_y.dtype), mask=inside)
    if EARLY:  # a program without items must also wait: the next kernel relies on shrink being done
        gdc_wait()
