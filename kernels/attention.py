"""Attention over a paged key/value cache, for packed batches that mix prefill and decode."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from personae.kernels import reference
from personae.kernels.registry import Operator, choose


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Which packed tokens are whose, and where each row's cache lies. Built once per step, for all layers.

    The T tokens of the step lie packed, row after row; row b has `query_start[b + 1] - query_start[b]` of
    them, the last ones of its `kv_length[b]` tokens. All tensors lie on the model's device, contiguous, int32
    unless said.
    """

    query_start: Tensor
    """[B + 1] offsets of the rows in the packed tokens."""
    kv_length: Tensor
    """[B] tokens in the cache after this step's are appended."""
    page_table: Tensor
    """[B, max_pages] page ids; what lies past a row's last page is not attended to, but is a valid id."""
    write_index: Tensor
    """[T] int64: page * page_size + offset, where each packed token's k and v go."""
    max_query: int
    """The most tokens that a row has in this step."""
    max_kv: int
    """The largest kv_length."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What layers have in common that share a plan. dtype: of queries; kv_dtype: of the cache."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype

    @classmethod
    def of(cls, q: Tensor, k_cache: Tensor) -> "AttentionShape":
        """q: [T, heads, D], k_cache: [num_pages, kv_heads, page_size, D]."""
        _, kv_heads, page_size, dim = k_cache.shape
        return cls(q.shape[1], kv_heads, dim, page_size, q.dtype, k_cache.dtype)


AttentionPlan = Callable[[Tensor, Tensor, Tensor, float, int | None], Tensor]
"""(q [T, heads, D], k_cache, v_cache, scale, window) -> [T, heads, D]: one layer of a step; see
`reference.paged_attention`."""


class AttentionBackend(ABC):
    """Causal attention over the cache. A step is planned once, then each layer runs by that plan."""

    @abstractmethod
    def plan(self, batch: AttentionBatch, shape: AttentionShape) -> AttentionPlan:
        """What a step's layers of that shape have in common: work lists, splits, scratch memory."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """One layer with a plan of its own."""
        return self.plan(batch, AttentionShape.of(q, k_cache))(q, k_cache, v_cache, scale, window)


class ReferenceAttention(AttentionBackend):
    """`reference.paged_attention`; the rows are grouped once per step."""

    def plan(self, batch: AttentionBatch, shape: AttentionShape) -> AttentionPlan:
        """See AttentionBackend."""
        groups = list(reference.attention_groups(batch))
        return lambda q, k_cache, v_cache, scale, window: reference.attend(
            q, k_cache, v_cache, batch, groups, scale, window
        )


def attention_backend(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The implementation for queries of that dtype. Raises KernelError."""
    return cast(AttentionBackend, choose("paged_attention", device, dtype, ReferenceAttention()))


append_kv = Operator(reference.append_kv)
paged_attention = Operator(reference.paged_attention)
