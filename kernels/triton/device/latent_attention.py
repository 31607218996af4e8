"""Attention of absorbed queries over a paged cache of latent vectors (MLA).

A program takes some heads of one token and a range of its keys. A block of latent vectors is read once: it is
what the queries are compared with, and what is summed. Ranges are merged as in `attention.py`.
"""

import triton
import triton.language as tl

from personae.kernels.triton.device.attention import splits_of


@triton.jit(do_not_specialize=["table_stride", "most_splits"])
def latent_kernel(
    q_ptr,
    cache_ptr,
    out_ptr,
    sums_ptr,
    stats_ptr,
    row_ptr,
    seen_ptr,
    table_ptr,
    q_stride,
    table_stride,
    page_stride,
    scale,
    most_splits,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_WIDE: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_WIDE: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SHORTEST: tl.constexpr,
):
    """out[t, h] = softmax(scale q[t, h] . c) c[:LATENT], or its parts. Grid (tokens, blocks of ROWS heads,
    splits).

    A token sees the first `seen` tokens of its row, none if it is 0. scale includes log2(e). For split
    tokens: sums [T, splits, HEADS, LATENT] float32, not normalised, and stats [T, splits, HEADS, 2] float32.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    seen = tl.load(seen_ptr + token)
    parts, part = splits_of(1, seen, 1, most_splits, SHORTEST, KEYS)
    if split < parts:
        live = head < HEADS
        d = tl.arange(0, LATENT_WIDE)
        r = tl.arange(0, ROPE_WIDE)
        real, turned = d < LATENT, r < ROPE
        q_row = q_ptr + token * q_stride + head * (LATENT + ROPE)
        q = tl.load(q_row[:, None] + d[None, :], mask=live[:, None] & real[None, :], other=0.0)
        q_turned = tl.load(
            q_row[:, None] + LATENT + r[None, :], mask=live[:, None] & turned[None, :], other=0.0
        )
        pages = table_ptr + tl.load(row_ptr + token).to(tl.int64) * table_stride
        begin = split * part
        end = tl.minimum(begin + part, seen)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, LATENT_WIDE], tl.float32)
        for first in range(begin, end, KEYS):
            keys = first + tl.arange(0, KEYS)
            inside = keys < end
            # Keys from `end` on are not read: their pages may hold any value, and 0 * NaN is NaN.
            page = tl.load(pages + keys // PAGE, mask=inside, other=0).to(tl.int64)
            kept = cache_ptr + page * page_stride + (keys % PAGE) * (LATENT + ROPE)
            c = tl.load(kept[:, None] + d[None, :], mask=inside[:, None] & real[None, :], other=0.0)
            k = tl.load(
                kept[None, :] + LATENT + r[:, None], mask=inside[None, :] & turned[:, None], other=0.0
            )
            c = c.to(q.dtype)
            scores = tl.dot(q, tl.trans(c), input_precision="ieee")
            scores = tl.dot(q_turned, k.to(q.dtype), scores, input_precision="ieee") * scale
            scores = tl.where(inside[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))  # a block has a key, so it is a number
            p = tl.exp2(scores - higher[:, None])
            shrink = tl.exp2(top - higher)
            weight = weight * shrink + tl.sum(p, 1)
            acc = tl.dot(p.to(q.dtype), c, acc * shrink[:, None], input_precision="ieee")
            top = higher
        inside_out = live[:, None] & real[None, :]
        if parts == 1:
            out = out_ptr + (token * HEADS + head) * LATENT
            tl.store(out[:, None] + d[None, :], (acc / weight[:, None]).to(q.dtype), mask=inside_out)
        else:
            entry = (token * most_splits + split) * HEADS + head
            tl.store(sums_ptr + entry[:, None] * LATENT + d[None, :], acc, mask=inside_out)
            tl.store(stats_ptr + entry * 2, top, mask=live)
            tl.store(stats_ptr + entry * 2 + 1, weight, mask=live)
