"""Causal attention over the cache: what a backend implements, and the one that every machine has."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from personae.kernels import reference
from personae.kernels.attention import AttentionBatch, AttentionShape, ScoreChange
from personae.kernels.registry import choose

AttentionPlan = Callable[[Tensor, Tensor, Tensor, float, int | None], Tensor]
"""(q [T, heads, D], k_cache, v_cache, scale, window) -> [T, heads, D]: one layer of a step; see
`reference.paged_attention`."""


class AttentionBackend(ABC):
    """Causal attention over the cache. A step is planned once, and each layer runs with that plan."""

    @abstractmethod
    def plan(self, batch: AttentionBatch, shape: AttentionShape) -> AttentionPlan:
        """Work lists, splits and scratch memory that the step's layers of this shape share."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """One layer with its own plan."""
        return self.plan(batch, AttentionShape.of(q, k_cache))(q, k_cache, v_cache, scale, window)


class ReferenceAttention(AttentionBackend):
    """`reference.paged_attention`; the rows are grouped once per step."""

    def plan(self, batch: AttentionBatch, shape: AttentionShape) -> AttentionPlan:
        """See AttentionBackend."""
        return self.planned(batch)(None)

    def planned(self, batch: AttentionBatch) -> "Callable[[ScoreChange | None], AttentionPlan]":
        """The plans of layers of any shape, by what changes their scores. No backend has an operator for
        changed scores."""
        groups = reference.attention_groups(batch)

        def of(scores: ScoreChange | None) -> AttentionPlan:
            return lambda q, k_cache, v_cache, scale, window: reference.attend(
                q, k_cache, v_cache, batch, groups, scale, window, scores
            )

        return of


def attention_backend(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The implementation for queries of that dtype. Raises KernelError."""
    return cast(AttentionBackend, choose("paged_attention", device, dtype, ReferenceAttention()))
