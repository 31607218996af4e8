"""Attention over a paged key/value cache, for packed batches that mix prefill and decode."""

from dataclasses import dataclass

from torch import Tensor

from personae.kernels import reference
from personae.kernels.registry import select


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


def append_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, write_index: Tensor) -> None:
    """Writes k and v, each [T, kv_heads, D], to their places in the caches; see `reference.append_kv`."""
    select(reference.append_kv, k.device)(k, v, k_cache, v_cache, write_index)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Causal attention of q [T, heads, D] over the cache -> [T, heads, D]; see reference.paged_attention."""
    return select(reference.paged_attention, q.device)(q, k_cache, v_cache, batch, scale, window)
