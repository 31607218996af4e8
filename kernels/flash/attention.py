"""Attention over the paged cache by torch's variable-length attention, which FlashAttention 3 computes."""

from typing import cast

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn_out

from personae.kernels.attention import AttentionBatch, AttentionShape
from personae.kernels.attention_backend import AttentionBackend, AttentionPlan

FEWEST = 33  # tokens of the longest row: graphs capture steps of shorter rows, with the other kernels


class FlashAttention(AttentionBackend):
    """Steps with a prompt. All others, and caches in FP8, go to `others`.

    The bits of a row then depend on whether a prompt is in its step.
    """

    def __init__(self, others: AttentionBackend) -> None:
        self._others = others

    def plan(self, batch: AttentionBatch, shape: AttentionShape) -> AttentionPlan:
        """See AttentionBackend."""
        if batch.max_query < FEWEST or shape.kv_dtype is not shape.dtype:
            return self._others.plan(batch, shape)
        if batch.kv_length.is_cuda and current_flash_attention_impl() != "FA3":
            activate_flash_attention_impl("FA3")  # torch's own, FlashAttention 2, reads no pages of 16 tokens
        return FlashPlan(batch, shape)


class FlashPlan:
    """The calls of a step's layers."""

    def __init__(self, batch: AttentionBatch, shape: AttentionShape) -> None:
        self._batch, self._grouped = batch, shape.heads != shape.kv_heads

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """See AttentionPlan."""
        batch = self._batch
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        varlen_attn_out(
            out,
            q,
            k_cache.transpose(1, 2),  # a view [pages, page_size, kv_heads, D]
            v_cache.transpose(1, 2),
            batch.query_start,
            cast(Tensor, None),  # the lengths of keys are seqused_k
            batch.max_query,
            batch.max_kv,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),  # keys before and after a query
            enable_gqa=self._grouped,
            seqused_k=batch.kv_length,
            block_table=batch.page_table,
            num_splits=1,  # so that a row's sums do not depend on the other rows
        )
        return out
