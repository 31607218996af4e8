"""Attention over a paged key/value cache, for packed batches that mix prefill and decode."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SHORTEST_SPLIT = 256
"""Keys of a part, at least, where a sequence is split among programs; for fewer, merging costs more than the
split gains."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Which packed tokens belong to which row, and where each row's cache lies. Built once per step, for all
    layers.

    The T tokens of the step are packed row after row. Row b has `query_start[b + 1] - query_start[b]` of
    them, the last ones of its `kv_length[b]` tokens. All tensors are on the model's device, contiguous, and
    int32 unless noted.
    """

    query_start: Tensor
    """[B + 1] offsets of the rows in the packed tokens."""
    kv_length: Tensor
    """[B] tokens in the cache after this step's are appended."""
    page_table: Tensor
    """[B, max_pages] page ids. Entries past a row's last page are valid ids, but are not attended to."""
    write_index: Tensor
    """[T] int64: page * page_size + offset, where each packed token's k and v are written."""
    max_query: int
    """The most tokens of one row in this step."""
    max_kv: int
    """The largest kv_length."""
    host: tuple[NDArray[np.integer], NDArray[np.integer]] | None = None
    """`query_start` and `kv_length` where the host has them, too."""

    def sizes(self) -> tuple[list[int], list[int]]:
        """`query_start` and `kv_length` as numbers. Waits for the device unless the host has them."""
        starts, lengths = (self.query_start, self.kv_length) if self.host is None else self.host
        return starts.tolist(), lengths.tolist()


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the layers that share a plan have in common. dtype: of queries; kv_dtype: of the cache."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype

    @classmethod
    def of(cls, q: Tensor, k_cache: Tensor) -> "AttentionShape":
        """q: [T, heads, D], k_cache: [num_pages, kv_heads, page_size, kv_width of D]."""
        _, kv_heads, page_size, _ = k_cache.shape
        return cls(q.shape[1], kv_heads, q.shape[2], page_size, q.dtype, k_cache.dtype)


def kv_width(head_dim: int, dtype: torch.dtype) -> int:
    """How many elements a cache of that dtype has for a head's key or value: in int8 also those of its
    scale."""
    return head_dim + 2 if dtype is torch.int8 else head_dim


@dataclass(frozen=True, slots=True, eq=False)
class ScoreChange:
    """What changes a layer's scores s. `softcap`: they become softcap * tanh(s / softcap). `sinks`: [heads]
    float32, each head's score of a key without a value. `chunk`: positions are in chunks of that many tokens,
    and a query sees only keys of its own chunk."""

    softcap: float | None = None
    sinks: Tensor | None = None
    chunk: int | None = None
