"""From logits to tokens: three launches, four if a row asks for top_k or top_p.

A row of logits is cut into chunks. `greatest_kernel` and `weigh_kernel` take one chunk per program,
`gather_kernel` several chunks of a row, `draw_kernel` a whole row. `sampling_filters.py` explains how top_k
and top_p are found.
"""

import triton
import triton.language as tl

from personae.kernels.triton.device.sampling_filters import (
    LEVELS,
    ONE,
    chunk_levels,
    counts_above,
    edge_of,
    least_of,
    level_of,
    rounds_of,
    total_of,
)

STREAM = tl.constexpr(0)  # rows of the table of parameters, [7, rows] int64
POSITION = tl.constexpr(1)
TOP_K = tl.constexpr(2)
TOP_P = tl.constexpr(3)  # this and the next two: the bits of float64 values
TEMPERATURE = tl.constexpr(4)
MIN_P = tl.constexpr(5)
MASK = tl.constexpr(6)  # the row's mask, or -1

# Columns of the table of narrowed rows, [rows, 4] float64.
LISTED = tl.constexpr(0)  # how many weights are listed
LOW = tl.constexpr(1)  # the bits at which the search for the least kept weight begins
ROUNDS = tl.constexpr(2)  # the rounds of that search
BASE = tl.constexpr(3)  # the sum of the weights above the listed ones


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def uniform(stream, position):
    """The number in [0, 1), float64, of `kernels/counter_rng.py`, bit for bit. stream, position: int64."""
    counter = position.to(tl.uint64, bitcast=True) + 1
    bits = _mix(stream.to(tl.uint64, bitcast=True) + counter * 0x9E3779B97F4A7C15)
    return (bits >> 11).to(tl.int64, bitcast=True).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _filters(rows_ptr, rows, row):
    """A row's top_k, 0 if it has none, and its top_p, 1 or more if it has none."""
    top_k = tl.load(rows_ptr + TOP_K * rows + row)
    return top_k, tl.load(rows_ptr + TOP_P * rows + row).to(tl.float64, bitcast=True)


@triton.jit
def _masked(logits_ptr, stride, rows_ptr, rows, masks_ptr, words, row, t, inside):
    """The row's logits at ids t; those that its grammar forbids are minus infinity. A NaN stays a NaN."""
    x = tl.load(logits_ptr + row * stride + t, mask=inside, other=float("-inf"))
    mask = tl.load(rows_ptr + MASK * rows + row)
    if mask >= 0:
        word = tl.load(masks_ptr + mask * words + t // 32, mask=inside, other=-1)
        x += tl.where((word >> (t % 32)) & 1 == 1, 0.0, float("-inf"))
    return x


@triton.jit(do_not_specialize=["rows", "words"])
def greatest_kernel(
    logits_ptr,
    rows_ptr,
    masks_ptr,
    tops_ptr,
    ids_ptr,
    stride,
    rows,
    words,
    width,
    CHUNK: tl.constexpr,
):
    """A chunk's largest allowed logit, NaN if the chunk has one, and its lowest id. Grid (rows, chunks)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    t = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _masked(logits_ptr, stride, rows_ptr, rows, masks_ptr, words, row, t, t < width)
    wrong = x != x
    x = tl.where(wrong, float("-inf"), x)
    top = tl.max(x, 0)
    place = row * tl.num_programs(1) + chunk
    tl.store(ids_ptr + place, tl.min(tl.where(x == top, t, 2147483647), 0))
    tl.store(tops_ptr + place, tl.where(tl.max(wrong.to(tl.int32), 0) > 0, float("nan"), top))


@triton.jit(do_not_specialize=["rows", "words", "chunks"])
def weigh_kernel(
    logits_ptr,
    rows_ptr,
    masks_ptr,
    tops_ptr,
    ids_ptr,
    weights_ptr,
    sums_ptr,
    counts_ptr,
    level_sums_ptr,
    best_ptr,
    tokens_ptr,
    stride,
    rows,
    words,
    width,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """w = exp((x - best) / temperature), which replaces the logits; and the largest and the sum of each
    chunk.

    Grid (rows, chunks), or (rows, 1) if no row draws. The first program of a row writes its maximum and where
    it is: that is the token, unless the row draws. For a row with top_k or top_p it also writes counts and
    sums [rows, LEVELS, chunks] of the weights above each edge.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    each = tl.arange(0, CHUNKS)
    there = each < chunks
    tops = tl.load(tops_ptr + row * chunks + each, mask=there, other=float("-inf"))
    ids = tl.load(ids_ptr + row * chunks + each, mask=there, other=2147483647)
    wrong = tops != tops
    best = tl.max(tl.where(wrong, float("-inf"), tops), 0)
    if chunk == 0:
        token = tl.min(tl.where(tops == best, ids, 2147483647), 0)
        tl.store(tokens_ptr + row, tl.minimum(token, width - 1).to(tl.int64))
        failed = tl.max(wrong.to(tl.int32), 0) > 0
        tl.store(best_ptr + row, tl.where(failed, float("nan"), best))
    temperature = tl.load(rows_ptr + TEMPERATURE * rows + row).to(tl.float64, bitcast=True).to(tl.float32)
    if temperature > 0:
        t = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = t < width
        x = _masked(logits_ptr, stride, rows_ptr, rows, masks_ptr, words, row, t, inside)
        w = tl.exp((x - best) / temperature)
        tl.store(logits_ptr + row * stride + t, w, mask=inside)
        place = row * chunks + chunk
        tl.store(weights_ptr + place, tl.max(w, 0))
        tl.store(sums_ptr + place, tl.sum(w, 0).to(tl.float64))
        top_k, top_p = _filters(rows_ptr, rows, row)
        if (top_k > 0) | (top_p < 1):
            level = row * LEVELS * chunks + chunk
            chunk_levels(w, inside, counts_ptr + level, level_sums_ptr + level, chunks)


@triton.jit(do_not_specialize=["rows", "chunks", "chunks_each"])
def gather_kernel(
    weights_ptr,
    rows_ptr,
    sums_ptr,
    counts_ptr,
    level_sums_ptr,
    lists_ptr,
    narrowed_ptr,
    stride,
    rows,
    width,
    chunks,
    chunks_each,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Lists the weights that include a row's least kept one, [rows, width], and writes where to search.

    With top_k: all weights in or above the interval of the k-th largest. With top_p only: those of the
    interval in which the running sum reaches it. Grid (rows, programs), each with `chunks_each` chunks.
    """
    row = tl.program_id(0).to(tl.int64)
    own = tl.program_id(1) * chunks_each
    temperature = tl.load(rows_ptr + TEMPERATURE * rows + row).to(tl.float64, bitcast=True)
    top_k, top_p = _filters(rows_ptr, rows, row)
    by_count = top_k > 0
    if (temperature > 0) & (by_count | (top_p < 1)):
        each = tl.arange(0, CHUNKS)
        there = each < chunks
        total = tl.sum(tl.load(sums_ptr + row * chunks + each, mask=there, other=0.0), 0)
        counts = counts_ptr + row * LEVELS * chunks
        target = tl.where(by_count, top_k.to(tl.float64), top_p * total)
        sums = level_sums_ptr + row * LEVELS * chunks
        level, base = level_of(counts, sums, target, by_count, chunks, BLOCK)
        before = tl.where(by_count, -1, level - 1)
        listed = counts_above(counts, level, chunks, width, CHUNK, CHUNKS)
        listed -= counts_above(counts, before, chunks, width, CHUNK, CHUNKS)
        ends = tl.cumsum(listed, 0)
        low = edge_of(level)
        high = tl.where(before < 0, ONE + 1, edge_of(before))
        if own == 0:
            narrowed = narrowed_ptr + row * 4
            tl.store(narrowed + LISTED, tl.sum(listed, 0).to(tl.float64))
            tl.store(narrowed + LOW, low.to(tl.float64))
            tl.store(narrowed + ROUNDS, rounds_of(level).to(tl.float64))
            tl.store(narrowed + BASE, tl.where(by_count, 0.0, base))
        for chunk in range(own, tl.minimum(own + chunks_each, chunks)):
            mine = each == chunk
            count = tl.sum(tl.where(mine, listed, 0), 0)
            if count > 0:
                t = chunk * CHUNK + tl.arange(0, CHUNK)
                inside = t < width
                w = tl.load(weights_ptr + row * stride + t, mask=inside, other=0.0)
                w = tl.where(w <= 1.0, w, 0.0)
                bits = w.to(tl.int32, bitcast=True)
                wanted = inside & (bits >= low) & (bits < high)
                place = tl.sum(tl.where(mine, ends, 0), 0) - count
                place += tl.cumsum(wanted.to(tl.int32), 0) - 1
                tl.store(lists_ptr + row * width + place, w, mask=wanted)


@triton.jit(do_not_specialize=["rows", "chunks"])
def draw_kernel(
    weights_ptr,
    rows_ptr,
    tops_ptr,
    sums_ptr,
    lists_ptr,
    narrowed_ptr,
    tokens_ptr,
    stride,
    rows,
    width,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """The token of a row that draws: the first t with w_0 + ... + w_t > u sum(w) over the kept weights.

    TILE: weights of a list that are read at once. TOGETHER: chunks that are read at once.
    """
    row = tl.program_id(0).to(tl.int64)
    parameters = rows_ptr + row
    temperature = tl.load(parameters + TEMPERATURE * rows).to(tl.float64, bitcast=True)
    if temperature > 0:
        w_ptr = weights_ptr + row * stride
        each = tl.arange(0, CHUNKS)
        there = each < chunks
        sums = tl.load(sums_ptr + row * chunks + each, mask=there, other=0.0)
        least = tl.load(parameters + MIN_P * rows).to(tl.float64, bitcast=True).to(tl.float32)
        top_k, top_p = _filters(rows_ptr, rows, row)
        if (top_k > 0) | (top_p < 1):
            narrowed = narrowed_ptr + row * 4
            listed = tl.load(narrowed + LISTED).to(tl.int32)
            low = tl.load(narrowed + LOW).to(tl.int32)
            rounds = tl.load(narrowed + ROUNDS).to(tl.int32)
            base = tl.load(narrowed + BASE)
            list_ptr = lists_ptr + row * width
            total = tl.sum(sums, 0)
            for search in range(2):  # first top_k by number, then top_p by the sum of the rest
                by_count = search == 0
                if tl.where(by_count, top_k > 0, top_p < 1):
                    target = tl.where(by_count, top_k.to(tl.float64), top_p * total)
                    low = least_of(list_ptr, listed, low, rounds, base, target, by_count, TILE)
                    if by_count:
                        total = total_of(list_ptr, listed, low, target, TILE)
                        rounds = 15  # the nucleus of these may begin at any weight above
            least = tl.maximum(least, low.to(tl.float32, bitcast=True))
        if least > 0:
            tops = tl.load(tops_ptr + row * chunks + each, mask=there, other=-1.0)
            first = tl.min(tl.where(tops >= least, each, CHUNKS), 0)
            sums = tl.zeros([CHUNKS], tl.float64)
            for group in range(first // TOGETHER * TOGETHER, chunks, TOGETHER):
                if tl.max(tl.where((each >= group) & (each < group + TOGETHER), tops, -1.0), 0) >= least:
                    chunk = group + tl.arange(0, TOGETHER)
                    t = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
                    w = tl.load(w_ptr + t, mask=t < width, other=0.0)
                    kept = tl.sum(tl.where(w >= least, w, 0.0), 1).to(tl.float64)
                    here = each[:, None] == chunk[None, :]
                    sums += tl.sum(tl.where(here, kept[None, :], 0.0), 1)

        stream = tl.load(parameters + STREAM * rows)
        target = uniform(stream, tl.load(parameters + POSITION * rows)) * tl.sum(sums, 0)
        # Sums in different orders differ in their last bits, so a running sum may just miss the target. Then
        # the last weight is drawn. A weight of zero is never drawn.
        over = (tl.cumsum(sums, 0) > target) & (sums > 0)
        chunk = tl.min(tl.where(over, each, CHUNKS), 0)
        chunk = tl.where(chunk == CHUNKS, tl.max(tl.where(sums > 0, each, 0), 0), chunk)
        target -= tl.sum(tl.where(each < chunk, sums, 0.0), 0)
        place = tl.arange(0, CHUNK)
        t = chunk * CHUNK + place
        w = tl.load(w_ptr + t, mask=t < width, other=0.0)
        w = tl.where(w >= least, w, 0.0)
        over = (tl.cumsum(w.to(tl.float64), 0) > target) & (w > 0)
        first = tl.min(tl.where(over, place, CHUNK), 0)
        first = tl.where(first == CHUNK, tl.max(tl.where(w > 0, place, 0), 0), first)
        tl.store(tokens_ptr + row, tl.minimum(chunk * CHUNK + first, width - 1).to(tl.int64))
