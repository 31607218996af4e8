"""Rotary position embedding."""

from torch import Tensor

from personae.kernels import reference
from personae.kernels.registry import select


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates q [T, heads, D] and k [T, kv_heads, D] in place; see `reference.rotary`."""
    select(reference.rotary, q.device)(q, k, positions, cos, sin)
