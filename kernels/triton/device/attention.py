"""Attention over paged keys and values, with an online softmax (https://arxiv.org/abs/2205.14135).

A program takes a tile of one sequence's queries for one key/value head, and a range of its keys. The query
heads that share the key/value head are side by side in the tile, so each page is read once for all of them.
If a sequence's keys are split among several programs, each program writes its sum, maximum and weight.
`merge_kernel` combines them, always in the same order (flash-decoding, https://arxiv.org/abs/2311.01282).
"""

import triton
import triton.language as tl

PREFILL_ROWS = tl.constexpr(64)  # of a tile, from here on


@triton.jit
def splits_of(count, keys, split_queries, most_splits, SHORTEST: tl.constexpr, KEYS: tl.constexpr):
    """(parts, keys in each part but the last): how a sequence's keys are split. It depends on that sequence
    only.

    count: its queries. keys: how many keys its queries see together. Many queries fill the device without
    splits.
    """
    parts = tl.minimum((keys + SHORTEST - 1) // SHORTEST, most_splits)
    parts = tl.maximum(tl.where(count <= split_queries, parts, 1), 1)
    length = tl.maximum(((keys + parts - 1) // parts + KEYS - 1) // KEYS, 1) * KEYS
    return (keys + length - 1) // length, length


@triton.jit
def visible_keys(count, length, window, WINDOWED: tl.constexpr, KEYS: tl.constexpr):
    """The first key that any of the last `count` queries sees, rounded down to a block of KEYS."""
    first = 0
    if WINDOWED:
        first = tl.maximum(length - count - window + 1, 0) // KEYS * KEYS
    return first


@triton.jit
def attend(
    q,
    acc,
    weight,
    top,
    k_ptr,
    v_ptr,
    pages,
    page_stride,
    head_offset,
    key,
    end,
    position,
    scale,
    window,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
    EDGE: tl.constexpr,
):
    """(acc, weight, top) after KEYS more keys from `key` on. EDGE: a query may not see some of them."""
    keys = key + tl.arange(0, KEYS)
    d = tl.arange(0, WIDE)
    real = d < DIM
    inside = keys < end
    if EDGE:
        # Keys from `end` on are not read: their pages may hold any value, and 0 * NaN is NaN.
        page = tl.load(pages + keys // PAGE, mask=inside, other=0).to(tl.int64)
    else:
        page = tl.load(pages + keys // PAGE).to(tl.int64)
    offset = page * page_stride + head_offset + (keys % PAGE) * DIM
    k_block = k_ptr + offset[None, :] + d[:, None]
    if EDGE:
        k = tl.load(k_block, mask=inside[None, :] & real[:, None], other=0.0)
    elif WIDE == DIM:
        k = tl.load(k_block)
    else:
        k = tl.load(k_block, mask=real[:, None], other=0.0)
    scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
    if EDGE:
        seen = inside[None, :] & (keys[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (keys[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    level = higher
    if EDGE:
        # A query that has seen no key yet has no maximum, and -inf - -inf would be NaN.
        level = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(scores - level[:, None])
    shrink = tl.exp2(top - level)
    weight = weight * shrink + tl.sum(p, 1)
    v_block = v_ptr + offset[:, None] + d[None, :]
    if EDGE:
        v = tl.load(v_block, mask=inside[:, None] & real[None, :], other=0.0)
    elif WIDE == DIM:
        v = tl.load(v_block)
    else:
        v = tl.load(v_block, mask=real[None, :], other=0.0)
    acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
    return acc, weight, higher


@triton.jit(do_not_specialize=["sequences", "table_stride", "most_splits", "split_queries"])
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    sums_ptr,
    stats_ptr,
    query_start_ptr,
    kv_length_ptr,
    table_ptr,
    sequences,
    q_stride,
    table_stride,
    page_stride,
    scale,
    window,
    split_queries,
    most_splits,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SHORTEST: tl.constexpr,
    SEQUENCES: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """out[t, h] = softmax(scale q[t, h] . k) v, or its parts. Grid (query tiles, kv heads, splits).

    scale includes log2(e), because powers of two replace the exponentials. For split sequences: sums [slots,
    splits, HEADS, DIM] float32, not normalised, and stats [slots, splits, HEADS, 2] float32, maximum and
    weight. A slot is sequence * split_queries + query. SEQUENCES = 0: every sequence has one query.
    """
    QUERIES: tl.constexpr = ROWS // GROUP
    tile = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    if SEQUENCES == 0:
        sequence = tile
        tile = 0
    else:
        # The tiles of sequence s begin at query_start[s] // QUERIES + s. That is enough; a few stay unused.
        each = tl.arange(0, SEQUENCES)
        starts = tl.load(query_start_ptr + each, mask=each < sequences, other=1 << 30)
        bases = starts // QUERIES + each
        before = bases <= tile
        sequence = tl.sum(before.to(tl.int32), 0) - 1
        tile -= tl.max(tl.where(before, bases, 0), 0)
    start = tl.load(query_start_ptr + sequence)
    count = tl.load(query_start_ptr + sequence + 1) - start
    length = tl.load(kv_length_ptr + sequence)
    first_query = tile * QUERIES
    visible = visible_keys(count, length, window, WINDOWED, KEYS)
    parts, part = splits_of(count, length - visible, split_queries, most_splits, SHORTEST, KEYS)
    if (first_query < count) & (split < parts):
        row = tl.arange(0, ROWS)
        query = first_query + row // GROUP
        live = (row < QUERIES * GROUP) & (query < count)
        position = length - count + query
        d = tl.arange(0, WIDE)
        real = d < DIM
        q_row = q_ptr + (start + query).to(tl.int64) * q_stride + (head * GROUP + row % GROUP) * DIM
        q = tl.load(q_row[:, None] + d[None, :], mask=live[:, None] & real[None, :], other=0.0)

        last_query = tl.minimum(first_query + QUERIES, count) - 1
        begin = visible + split * part
        end = tl.minimum(begin + part, length - count + last_query + 1)
        if WINDOWED:
            begin = tl.maximum(begin, (length - count + first_query - window + 1) // KEYS * KEYS)

        pages = table_ptr + sequence.to(tl.int64) * table_stride
        head_offset = head * (PAGE * DIM)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, WIDE], tl.float32)
        # Blocks before the tile's first query are seen by all its queries and need no mask.
        PLAIN: tl.constexpr = (ROWS >= PREFILL_ROWS) and not WINDOWED
        edge = begin
        if PLAIN:
            edge += tl.maximum(tl.minimum(end, length - count + first_query + 1) - begin, 0) // KEYS * KEYS
        for masked in tl.static_range(0 if PLAIN else 1, 2):
            for key in range(edge if masked else begin, end if masked else edge, KEYS):
                acc, weight, top = attend(
                    q,
                    acc,
                    weight,
                    top,
                    k_ptr,
                    v_ptr,
                    pages,
                    page_stride,
                    head_offset,
                    key,
                    end,
                    position,
                    scale,
                    window,
                    DIM,
                    WIDE,
                    PAGE,
                    KEYS,
                    WINDOWED,
                    masked == 1,
                )

        at = head * GROUP + row % GROUP
        inside_out = live[:, None] & real[None, :]
        if parts == 1:
            out = out_ptr + ((start + query).to(tl.int64) * HEADS + at) * DIM
            share = 1.0 / tl.where(weight == 0.0, 1.0, weight)
            tl.store(out[:, None] + d[None, :], (acc * share[:, None]).to(q.dtype), mask=inside_out)
        else:
            slot = (sequence * split_queries + query).to(tl.int64)
            entry = (slot * most_splits + split) * HEADS + at
            tl.store(sums_ptr + entry[:, None] * DIM + d[None, :], acc, mask=inside_out)
            tl.store(stats_ptr + entry * 2, top, mask=live)
            tl.store(stats_ptr + entry * 2 + 1, weight, mask=live)


@triton.jit(do_not_specialize=["most_splits", "split_queries"])
def merge_kernel(
    out_ptr,
    sums_ptr,
    stats_ptr,
    query_start_ptr,
    kv_length_ptr,
    window,
    split_queries,
    most_splits,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    KEYS: tl.constexpr,
    SHORTEST: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """out = sum_s 2^(top_s - top) sum_s / sum_s 2^(top_s - top) weight_s. Grid (slots, HEADS).

    Only for sequences that were split; the outputs of the others are already written.
    """
    slot = tl.program_id(0)
    head = tl.program_id(1)
    sequence = slot // split_queries
    query = slot % split_queries
    start = tl.load(query_start_ptr + sequence)
    count = tl.load(query_start_ptr + sequence + 1) - start
    length = tl.load(kv_length_ptr + sequence)
    visible = visible_keys(count, length, window, WINDOWED, KEYS)
    parts, _ = splits_of(count, length - visible, split_queries, most_splits, SHORTEST, KEYS)
    if (query < count) & (parts > 1):
        split = tl.arange(0, SPLITS)
        written = split < parts
        entry = (slot.to(tl.int64) * most_splits + split) * HEADS + head
        top = tl.load(stats_ptr + entry * 2, mask=written, other=float("-inf"))
        weight = tl.load(stats_ptr + entry * 2 + 1, mask=written, other=0.0)
        # Every query sees itself, so one of the parts has a maximum.
        scale = tl.exp2(top - tl.max(top, 0))
        d = tl.arange(0, WIDE)
        real = d < DIM
        inside = written[:, None] & real[None, :]
        sums = tl.load(sums_ptr + entry[:, None] * DIM + d[None, :], mask=inside, other=0.0)
        mixed = tl.sum(sums * scale[:, None], 0) / tl.sum(weight * scale, 0)
        out = out_ptr + ((start + query).to(tl.int64) * HEADS + head) * DIM + d
        tl.store(out, mixed.to(out_ptr.dtype.element_ty), mask=real)
