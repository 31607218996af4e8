"""Finds what top_k and top_p keep of a row, without sorting and without atomics.

The bits of a float ascend with its value, so the largest weights are all weights from some bits on. Three
kernels narrow these bits down. `weigh_kernel` counts and sums the weights of each chunk above 32 fixed edges
(`chunk_levels`). The edges are three quarters of an octave apart down to 2^-19, and eight octaves apart
below. From these `gather_kernel`, with several programs per row, finds the one interval that has the least
kept weight, and lists the weights that matter. `draw_kernel` searches that list.
"""

import triton
import triton.language as tl

ONE = tl.constexpr(0x3F800000)  # the largest weight's bits
LEVELS = tl.constexpr(32)
FINE = tl.constexpr(26)  # the number of narrow levels; where a nucleus ends, many weights are similar
NARROW = tl.constexpr(6 << 20)  # bits between the edges of narrow levels: three quarters of an octave
BROAD = tl.constexpr(1 << 26)  # bits between the other edges, where few weights matter
GROUP = tl.constexpr(4)  # levels that are counted at once; more would not fit into registers


@triton.jit
def edge_of(level):
    """The bits of the smallest weight above the level's edge. Past the last level: 0, so all weights are
    above."""
    narrow, broad = tl.minimum(level + 1, FINE), tl.maximum(level + 1 - FINE, 0)
    return tl.where(level < LEVELS, ONE + 1 - narrow * NARROW - broad * BROAD, 0)


@triton.jit
def rounds_of(level):
    """How many pairs of bits a level's interval has."""
    return tl.where(level < FINE, 12, tl.where(level < LEVELS, 13, 15))


@triton.jit
def chunk_levels(w, inside, counts_ptr, sums_ptr, LEVEL_STRIDE):
    """Stores how many of a chunk's weights lie above each edge, and their sum."""
    w = tl.where(w <= 1.0, w, 0.0)  # a failed row's NaN does not count
    bits = tl.where(inside, w.to(tl.int32, bitcast=True), -1)
    for group in tl.static_range(LEVELS // GROUP):
        level = group * GROUP + tl.arange(0, GROUP)
        above = bits[None, :] >= edge_of(level)[:, None]
        tl.store(counts_ptr + level * LEVEL_STRIDE, tl.sum(above.to(tl.int32), 1))
        tl.store(sums_ptr + level * LEVEL_STRIDE, tl.sum(tl.where(above, w[None, :], 0.0), 1))


@triton.jit
def level_of(counts_ptr, sums_ptr, target, by_count, chunks, BLOCK: tl.constexpr):
    """The first level whose weights reach the target, LEVELS if none does, and the sum of the levels before
    it."""
    level = tl.arange(0, LEVELS)
    counts = tl.zeros([LEVELS], tl.int32)
    sums = tl.zeros([LEVELS], tl.float64)
    for first in range(0, chunks, BLOCK):
        chunk = first + tl.arange(0, BLOCK)
        there = (chunk < chunks)[None, :]
        at = level[:, None] * chunks + chunk[None, :]
        counts += tl.sum(tl.load(counts_ptr + at, mask=there, other=0), 1)
        sums += tl.sum(tl.load(sums_ptr + at, mask=there, other=0.0).to(tl.float64), 1)
    reached = tl.where(by_count, counts.to(tl.float64), sums) >= target
    found = tl.min(tl.where(reached, level, LEVELS), 0)
    return found, tl.max(tl.where(level < found, sums, 0.0), 0)


@triton.jit
def counts_above(counts_ptr, level, chunks, width, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """How many weights of each chunk lie above the level's edge."""
    each = tl.arange(0, CHUNKS)
    there = each < chunks
    # Past the last level all weights count.
    found = tl.load(counts_ptr + level * chunks + each, mask=there & (level >= 0) & (level < LEVELS), other=0)
    return tl.where((level == LEVELS) & there, tl.minimum(width - each * CHUNK, CHUNK), found)


@triton.jit
def least_of(list_ptr, listed, low, rounds, base, target, by_count, TILE: tl.constexpr):
    """The largest bits from which on the weights reach the target, two bits per round; `low` if none do.

    listed: how many weights are at list_ptr. base: the sum of the weights above these. rounds: pairs of bits
    of the interval that begins at `low` and has the answer.
    """
    for round in range(rounds):
        step = 1 << (2 * (rounds - 1 - round))
        one = tl.zeros([TILE], tl.float32)
        two = tl.zeros([TILE], tl.float32)
        three = tl.zeros([TILE], tl.float32)
        for first in range(0, listed, TILE):
            at = first + tl.arange(0, TILE)
            w = tl.load(list_ptr + at, mask=at < listed, other=-1.0)
            bits = w.to(tl.int32, bitcast=True)
            value = tl.where(by_count, 1.0, w)
            one += tl.where(bits >= low + step, value, 0.0)
            two += tl.where(bits >= low + 2 * step, value, 0.0)
            three += tl.where(bits >= low + 3 * step, value, 0.0)
        found = (base + tl.sum(one, 0).to(tl.float64) >= target).to(tl.int32)
        found += (base + tl.sum(two, 0).to(tl.float64) >= target).to(tl.int32)
        found += (base + tl.sum(three, 0).to(tl.float64) >= target).to(tl.int32)
        low += found * step
    return low


@triton.jit
def total_of(list_ptr, listed, least, count, TILE: tl.constexpr):
    """The sum of the `count` largest weights; `least` has the bits of the smallest of them."""
    over = tl.zeros([TILE], tl.float32)
    over_count = tl.zeros([TILE], tl.int32)
    for first in range(0, listed, TILE):
        at = first + tl.arange(0, TILE)
        w = tl.load(list_ptr + at, mask=at < listed, other=-1.0)
        above = w.to(tl.int32, bitcast=True) > least
        over += tl.where(above, w, 0.0)
        over_count += above.to(tl.int32)
    # Of the weights equal to the least, only the remaining number counts.
    ties = count - tl.sum(over_count, 0).to(tl.float64)
    return tl.sum(over, 0).to(tl.float64) + ties * least.to(tl.float32, bitcast=True).to(tl.float64)
