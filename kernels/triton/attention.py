"""Calls the attention kernels. Nothing here waits for the device."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from personae.kernels.attention import AttentionBatch
from personae.kernels.triton.device.attention import attention_kernel, merge_kernel
from personae.kernels.triton.sizes import Gpu, ceil_div, power_of_two

SHORTEST_SPLIT = 256  # keys; shorter ones cost more in merging than they win
LISTED = 256  # sequences that a program finds its own among; more are padded to a power of two
SPLIT_SLOTS = 256  # queries whose sequences may be split, in all: it bounds the scratch memory


@dataclass(frozen=True, slots=True)
class Tile:
    """rows: queries times query heads per key/value head; keys: read at a time; warps, stages: to compile."""

    rows: int
    keys: int
    warps: int
    stages: int


def tile_for(max_query: int, group: int, dim: int, dtype: torch.dtype, gpu: Gpu) -> Tile:
    """Small for decode; 64 rows, Hopper's smallest matrix instruction, where there is a prefill.

    Before ptxas 13.3 a pipelined chain of those instructions with operands in registers could go wrong for
    float16, not for bfloat16 (triton issue 11781): float16 is not pipelined. Full float32 has no tensor
    cores, and large tiles of it would spill.
    """
    if dtype is torch.float32:
        return Tile(rows=max(16, power_of_two(group)), keys=32, warps=4, stages=1)
    rows = max_query * group
    if rows <= 32:
        # Keys are two reads away, by their page: of three stages one block is waited for while nothing is on
        # its way. Of five another is; only Hopper has the room.
        return Tile(rows=16 if rows <= 16 else 32, keys=64, warps=4, stages=5 if gpu.hopper else 3)
    rows, warps = max(64, power_of_two(group)), 4 if dim <= 128 else 8  # the sums of larger heads would spill
    if not gpu.hopper:  # accumulators and keys lie in registers: 64 keys would spill
        return Tile(rows, keys=32, warps=warps, stages=3)
    return Tile(rows, keys=64, warps=warps, stages=3 if dtype is torch.bfloat16 else 1)


def most_splits_for(max_kv: int, kv_heads: int, processors: int) -> int:
    """How many programs one sequence may occupy per key/value head: with all its heads, the device."""
    return max(1, min(ceil_div(max_kv, SHORTEST_SPLIT), power_of_two(max(1, processors // kv_heads))))


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    gpu: Gpu,
) -> Tensor:
    """See `reference.paged_attention`; heads contiguous, tokens may be strided."""
    tokens, heads, dim = q.shape
    kv_heads, page_size = k_cache.shape[1:3]
    group, sequences = heads // kv_heads, batch.kv_length.shape[0]
    tile = tile_for(batch.max_query, group, dim, q.dtype, gpu)
    splits = most_splits_for(batch.max_kv, kv_heads, gpu.processors)
    single = batch.max_query == 1
    split_queries = 1 if single else min(batch.max_query, max(1, SPLIT_SLOTS // sequences))
    slots = sequences * split_queries

    out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    parts = slots * splits * heads if splits > 1 else 1
    sums = torch.empty(parts * dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(parts * 2, dtype=torch.float32, device=q.device)
    tiles = sequences if single else tokens // (tile.rows // group) + sequences
    wide = max(16, power_of_two(dim))
    shared = {
        "HEADS": heads,
        "DIM": dim,
        "WIDE": wide,
        "KEYS": tile.keys,
        "SHORTEST": SHORTEST_SPLIT,
        "WINDOWED": window is not None,
    }
    attention_kernel[tiles, kv_heads, splits](
        q,
        k_cache,
        v_cache,
        out,
        sums,
        stats,
        batch.query_start,
        batch.kv_length,
        batch.page_table,
        sequences,
        q.stride(0),
        batch.page_table.stride(0),
        k_cache.stride(0),
        scale * math.log2(math.e),
        window or 0,
        split_queries,
        splits,
        GROUP=group,
        PAGE=page_size,
        ROWS=tile.rows,
        SEQUENCES=0 if single else max(LISTED, power_of_two(sequences)),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **shared,
    )
    if splits > 1:
        merge_kernel[slots, heads](
            out,
            sums,
            stats,
            batch.query_start,
            batch.kv_length,
            window or 0,
            split_queries,
            splits,
            SPLITS=power_of_two(splits),
            num_warps=2,
            **shared,
        )
    return out
