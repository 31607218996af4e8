"""From logits to tokens: three launches, whatever the rows ask for.

A row of logits is cut into chunks. `greatest_kernel` and `weigh_kernel` take a chunk each, `draw_kernel` a
row: it finds what top_k and top_p keep without sorting, 4 bits of the least weight at a time, and reads only
those chunks whose largest weight matters.
"""

import triton
import triton.language as tl

STREAM = tl.constexpr(0)  # rows of the table of parameters, [7, rows] int64
POSITION = tl.constexpr(1)
TOP_K = tl.constexpr(2)
TOP_P = tl.constexpr(3)  # the bits of float64s, as the next two
TEMPERATURE = tl.constexpr(4)
MIN_P = tl.constexpr(5)
MASK = tl.constexpr(6)  # the row's mask, or -1

BUCKETS = tl.constexpr(16)
ROUNDS = tl.constexpr(8)  # of four bits: a weight is at most 1, so its 30 lower bits tell


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def uniform(stream, position):
    """The number in [0, 1), float64, of `kernels/counter_rng.py`, bit for bit; stream, position: int64."""
    counter = position.to(tl.uint64, bitcast=True) + 1
    bits = _mix(stream.to(tl.uint64, bitcast=True) + counter * 0x9E3779B97F4A7C15)
    return (bits >> 11).to(tl.int64, bitcast=True).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _masked(logits_ptr, stride, rows_ptr, rows, masks_ptr, words, row, t, inside):
    """The row's logits at ids t, those that its grammar forbids minus infinity; a NaN stays a NaN."""
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
    """A chunk's largest allowed logit, NaN where one is, and its lowest id. Grid (rows, chunks)."""
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
    """w = exp((x - best) / temperature), in the logits' place, and per chunk the largest and the sum.

    Grid (rows, chunks), or (rows, 1) where no row draws. The first program of a row writes its maximum and
    where it is: the token, unless the row draws.
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


@triton.jit
def _least(w_ptr, tops_ptr, target, by_count, width, chunks, CHUNK: tl.constexpr):
    """The least weight, as its bits, of the smallest set of largest weights that reaches the target.

    The set is all w >= it; what must reach the target is their number or their sum. Also how many weights lie
    above the interval that was searched last, their sum, and the same of those in it: one weight, or equal
    ones.
    """
    bucket = tl.arange(0, BUCKETS)
    low = tl.full([], 0, tl.int32)
    above_count = tl.full([], 0.0, tl.float64)
    above_sum = tl.full([], 0.0, tl.float64)
    count = tl.full([], 2.0, tl.float64)
    total = tl.full([], 0.0, tl.float64)
    for round in range(ROUNDS):
        if count > 1:
            shift = tl.maximum(26 - 4 * round, 0)
            floor = low.to(tl.float32, bitcast=True)
            counts = tl.zeros([BUCKETS], tl.float64)
            sums = tl.zeros([BUCKETS], tl.float64)
            for chunk in range(chunks):
                if tl.load(tops_ptr + chunk) >= floor:
                    t = chunk * CHUNK + tl.arange(0, CHUNK)
                    w = tl.load(w_ptr + t, mask=t < width, other=-1.0)
                    bits = w.to(tl.int32, bitcast=True)  # ascend as the weights do; -1 is below them all
                    own = tl.where(bits >= low, (bits - low) >> shift, BUCKETS)
                    hit = own[None, :] == bucket[:, None]
                    counts += tl.sum(hit.to(tl.int32), 1).to(tl.float64)
                    sums += tl.sum(tl.where(hit, w[None, :], 0.0), 1).to(tl.float64)
            higher = bucket[None, :] > bucket[:, None]
            over_count = above_count + tl.sum(tl.where(higher, counts[None, :], 0.0), 1)
            over_sum = above_sum + tl.sum(tl.where(higher, sums[None, :], 0.0), 1)
            reached = tl.where(by_count, over_count + counts, over_sum + sums) >= target
            found = tl.max(tl.where(reached, bucket, 0), 0)  # none reaches: sums rounded down, keep all
            here = bucket == found
            low += found << shift
            above_count = tl.sum(tl.where(here, over_count, 0.0), 0)
            above_sum = tl.sum(tl.where(here, over_sum, 0.0), 0)
            count = tl.sum(tl.where(here, counts, 0.0), 0)
            total = tl.sum(tl.where(here, sums, 0.0), 0)
    return low, above_count, above_sum, count, total


@triton.jit(do_not_specialize=["rows", "chunks"])
def draw_kernel(
    weights_ptr,
    rows_ptr,
    tops_ptr,
    sums_ptr,
    tokens_ptr,
    stride,
    rows,
    width,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """The token of a row that draws: the first t with w_0 + ... + w_t > u sum(w) over what it keeps."""
    row = tl.program_id(0).to(tl.int64)
    parameters = rows_ptr + row
    temperature = tl.load(parameters + TEMPERATURE * rows).to(tl.float64, bitcast=True)
    if temperature > 0:
        w_ptr = weights_ptr + row * stride
        tops = tops_ptr + row * chunks
        each = tl.arange(0, CHUNKS)
        sums = tl.load(sums_ptr + row * chunks + each, mask=each < chunks, other=0.0)
        top_k = tl.load(parameters + TOP_K * rows)
        top_p = tl.load(parameters + TOP_P * rows).to(tl.float64, bitcast=True)
        least = tl.load(parameters + MIN_P * rows).to(tl.float64, bitcast=True).to(tl.float32)
        total = tl.sum(sums, 0)
        for search in range(2):  # top_k by number, then top_p of what that left by sum
            by_count = search == 0
            if tl.where(by_count, top_k > 0, top_p < 1):
                target = tl.where(by_count, top_k.to(tl.float64), top_p * total)
                low, above, mass, ties, tied = _least(w_ptr, tops, target, by_count, width, chunks, CHUNK)
                least = tl.maximum(least, low.to(tl.float32, bitcast=True))
                # Of weights that tie with the last, top_k has only as many as it counts.
                part = (target - above).to(tl.float32) / tl.maximum(ties, 1.0).to(tl.float32)
                total = tl.where(by_count, mass + tied * part.to(tl.float64), total)
        if least > 0:
            sums = tl.zeros([CHUNKS], tl.float64)
            for chunk in range(chunks):
                if tl.load(tops + chunk) >= least:
                    t = chunk * CHUNK + tl.arange(0, CHUNK)
                    w = tl.load(w_ptr + t, mask=t < width, other=0.0)
                    kept = tl.sum(tl.where(w >= least, w, 0.0), 0).to(tl.float64)
                    sums = tl.where(each == chunk, kept, sums)

        stream = tl.load(parameters + STREAM * rows)
        target = uniform(stream, tl.load(parameters + POSITION * rows)) * tl.sum(sums, 0)
        # Sums taken another way differ in their last bits, so a running sum may miss the target by them:
        # then it is the last weight. A weight of zero is never drawn.
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
