"""Launches the attention kernels, without waiting for the device."""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from personae.kernels.attention import SHORTEST_SPLIT, AttentionBatch, AttentionShape
from personae.kernels.attention_backend import AttentionBackend, AttentionPlan, ReferenceAttention
from personae.kernels.reference import FP8, paged_attention
from personae.kernels.triton.device.attention import attention_kernel, merge_kernel
from personae.kernels.triton.launch import Launch, launch
from personae.kernels.triton.sizes import FENCES, Gpu, ceil_div, power_of_two

TYPES = (torch.float32, torch.float16, torch.bfloat16)
LOG2_E = math.log2(math.e)
LISTED = 256  # least length of the list that a program searches for its sequence; longer: a power of two
SPLIT_SLOTS = 256  # most queries, over all sequences, that may be split: bounds the scratch memory


@dataclass(frozen=True, slots=True)
class Tile:
    """rows: queries times query heads per key/value head. keys: read at a time. warps, stages: compile
    options."""

    rows: int
    keys: int
    warps: int
    stages: int


def tile_for(max_query: int, group: int, dim: int, dtype: torch.dtype, gpu: Gpu) -> Tile:
    """The tile of a step: small for decode; for prefill 64 rows, the size of Hopper's smallest matrix
    instruction.

    Before ptxas 13.3 a pipelined chain of those instructions with operands in registers could compute wrong
    results for float16, not for bfloat16 (triton issue 11781). So float16 is not pipelined. Full float32 has
    no tensor cores, and its large tiles would spill registers.
    """
    if dtype is torch.float32:
        return Tile(rows=max(16, power_of_two(group)), keys=32, warps=4, stages=1)
    rows = max_query * group
    if rows <= 32:
        # A key takes two reads: its page id, then the key. With three stages no further block is being loaded
        # while one is waited for. With five stages another one is; only Hopper has enough memory for five.
        return Tile(rows=16 if rows <= 16 else 32, keys=64, warps=4, stages=5 if gpu.hopper else 3)
    rows, warps = max(64, power_of_two(group)), 4 if dim <= 128 else 8  # larger heads would spill registers
    if not gpu.hopper:  # accumulators and keys lie in registers; 64 keys would spill
        return Tile(rows, keys=32, warps=warps, stages=3)
    return Tile(rows, keys=64, warps=warps, stages=3 if dtype is torch.bfloat16 and FENCES else 1)


def most_splits_for(max_kv: int, kv_heads: int, processors: int) -> int:
    """The most programs for one sequence and key/value head: with all heads they fill the device."""
    return max(1, min(ceil_div(max_kv, SHORTEST_SPLIT), power_of_two(max(1, processors // kv_heads))))


class TritonAttention(AttentionBackend):
    """Plans the grids and the scratch memory of a step. Its layers use the memory one after the other."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._reference = ReferenceAttention()

    def plan(self, batch: AttentionBatch, shape: AttentionShape) -> AttentionPlan:
        """See AttentionBackend."""
        if shape.dtype not in TYPES or shape.kv_dtype not in (shape.dtype, FP8):
            return self._reference.plan(batch, shape)
        return TritonPlan(batch, shape, self._gpu)


class TritonPlan:
    """The launches of a step's layers. q has contiguous heads; its tokens may be strided."""

    def __init__(self, batch: AttentionBatch, shape: AttentionShape, gpu: Gpu) -> None:
        self._batch, self._shape = batch, shape
        group = shape.heads // shape.kv_heads
        self._sequences = sequences = batch.kv_length.shape[0]
        tokens = batch.write_index.shape[0]
        tile = tile_for(batch.max_query, group, shape.head_dim, shape.dtype, gpu)
        self._single = batch.max_query == 1
        self._splits = most_splits_for(batch.max_kv, shape.kv_heads, gpu.processors)
        self._split_queries = 1 if self._single else min(batch.max_query, max(1, SPLIT_SLOTS // sequences))
        self._slots = sequences * self._split_queries
        parts = self._slots * self._splits * shape.heads if self._splits > 1 else 1
        scratch = partial(torch.empty, dtype=torch.float32, device=batch.kv_length.device)
        self._sums, self._stats = scratch(parts * shape.head_dim), scratch(parts * 2)
        self._tiles = sequences if self._single else tokens // (tile.rows // group) + sequences
        self._constants = {
            "HEADS": shape.heads,
            "DIM": shape.head_dim,
            "WIDE": max(16, power_of_two(shape.head_dim)),
            "KEYS": tile.keys,
            "SHORTEST": SHORTEST_SPLIT,
        }
        self._own_constants = {
            "GROUP": group,
            "PAGE": shape.page_size,
            "ROWS": tile.rows,
            "SEQUENCES": 0 if self._single else max(LISTED, power_of_two(sequences)),
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }
        self._launches: dict[bool, tuple[Launch, Launch]] = {}
        self._grid = self._tiles, shape.kv_heads, self._splits
        self._table_stride = batch.page_table.stride(0)

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """See AttentionPlan."""
        batch = self._batch
        if q.stride()[1:] != (q.shape[2], 1):
            return paged_attention(q, k_cache, v_cache, batch, scale, window)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        attend, merge = self._launches.get(window is not None) or self._prepare(window is not None)
        attend(
            self._grid,
            (
                q,
                k_cache,
                v_cache,
                out,
                self._sums,
                self._stats,
                batch.query_start,
                batch.kv_length,
                batch.page_table,
            ),
            (
                self._sequences,
                q.stride(0),
                self._table_stride,
                k_cache.stride(0),
                scale * LOG2_E,
                window or 0,
                self._split_queries,
                self._splits,
            ),
        )
        if self._splits > 1:
            merge(
                (self._slots, self._shape.heads, 1),
                (out, self._sums, self._stats, batch.query_start, batch.kv_length),
                (window or 0, self._split_queries, self._splits),
            )
        return out

    def _prepare(self, windowed: bool) -> tuple[Launch, Launch]:
        """The launches of layers with or without a window."""
        shared = {**self._constants, "WINDOWED": windowed}
        found = self._launches[windowed] = (
            launch(attention_kernel, **self._own_constants, **shared),
            launch(merge_kernel, SPLITS=power_of_two(self._splits), num_warps=2, **shared),
        )
        return found
