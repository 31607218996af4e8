"""The Triton operators with the reference's signatures. They pass unsupported inputs to the reference."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from personae.kernels import reference, reference_latent
from personae.kernels.decoder import LinearWeights, PackedLinear
from personae.kernels.latent_attention import LatentPlan
from personae.kernels.masks import Scratch
from personae.kernels.registry import OPERATORS
from personae.kernels.sampling import SamplingRows
from personae.kernels.sgmv import RankTable, WeightPool, WorkList
from personae.kernels.sgmv_calls import Finish
from personae.kernels.side_stream import SideStream
from personae.kernels.triton import latent_attention as triton_latent
from personae.kernels.triton import moe as triton_moe
from personae.kernels.triton import pointwise
from personae.kernels.triton import quantized as triton_quantized
from personae.kernels.triton import sampling as triton_sampling
from personae.kernels.triton import sgmv as triton_sgmv
from personae.kernels.triton.attention import TYPES, TritonAttention
from personae.kernels.triton.sizes import Gpu


class TritonOperators:
    """Launches the kernels."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.paged_attention = TritonAttention(gpu)

    def by_name(self) -> dict[str, Callable[..., Any]]:
        """The operators under the reference's names, and `begin_sgmv` and `pack_linear`."""
        names = (*OPERATORS, "latent_attention", "expert_linear", "begin_sgmv", "pack_linear")
        return {name: getattr(self, name) for name in names}

    def sgmv(
        self,
        x: Tensor,
        ys: tuple[Tensor, ...],
        weight_pools: tuple[WeightPool, ...],
        tables: tuple[RankTable, ...],
        work: WorkList,
    ) -> None:
        """See `reference.sgmv`."""
        rows_contiguous = all(y.stride(1) == 1 for y in (x, *ys))
        if x.dtype not in TYPES or len(ys) > 3 or not rows_contiguous:
            reference.sgmv(x, ys, weight_pools, tables, work)
            return
        triton_sgmv.sgmv(x, ys, weight_pools, tables, work, self.gpu)

    def begin_sgmv(
        self,
        x: Tensor,
        weight_pools: tuple[WeightPool, ...],
        tables: tuple[RankTable, ...],
        work: WorkList,
        side_stream: SideStream,
    ) -> Finish:
        """See `kernels.sgmv_calls.sgmv_calls`. The rows of ys are contiguous."""
        if x.dtype not in TYPES or len(weight_pools) > 3 or x.stride(1) != 1:
            return lambda ys: self.sgmv(x, ys, weight_pools, tables, work)
        return triton_sgmv.begin_sgmv(x, weight_pools, tables, work, side_stream, self.gpu)

    def append_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, write_index: Tensor) -> None:
        """See `reference.append_kv`."""
        if k_cache.dtype not in (k.dtype, reference.FP8) or not _dense_heads(k) or not _dense_heads(v):
            reference.append_kv(k, v, k_cache, v_cache, write_index)
            return
        pointwise.append_kv(k, v, k_cache, v_cache, write_index)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `reference.rms_norm`."""
        if x.dtype not in TYPES or x.dim() not in (2, 3) or x.stride(-1) != 1:
            return reference.rms_norm(x, weight, eps)
        return pointwise.rms_norm(x, None, weight, eps)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `reference.add_rms_norm`."""
        if x.dtype not in TYPES or x.dim() != 2 or x.stride(1) != 1 or residual.stride(1) != 1:
            return reference.add_rms_norm(x, residual, weight, eps)
        return pointwise.rms_norm(x, residual, weight, eps)

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """See `reference.rotary`."""
        if q.dtype not in TYPES or q.stride(2) != 1 or k.stride(2) != 1:
            reference.rotary(q, k, positions, cos, sin)
            return
        pointwise.rotary(q, k, positions, cos, sin)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """See `reference.silu_and_mul`."""
        if x.dtype not in TYPES or x.stride(1) != 1:
            return reference.silu_and_mul(x)
        return pointwise.act_and_mul(x, gelu=False)

    def gelu_and_mul(self, x: Tensor) -> Tensor:
        """See `reference.gelu_and_mul`."""
        if x.dtype not in TYPES or x.stride(1) != 1:
            return reference.gelu_and_mul(x)
        return pointwise.act_and_mul(x, gelu=True)

    def latent_attention(self, q: Tensor, cache: Tensor, plan: LatentPlan, scale: float) -> Tensor:
        """See `reference_latent.latent_attention`."""
        if q.dtype not in TYPES or cache.dtype not in (q.dtype, reference.FP8) or not q.is_contiguous():
            return reference_latent.latent_attention(q, cache, plan, scale)
        return triton_latent.latent_attention(q, cache, plan, scale, self.gpu)

    def expert_linear(self, x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
        """See `reference.expert_linear`."""
        if x.dtype not in TYPES or x.stride(1) != 1 or not weight.is_contiguous():
            return reference.expert_linear(x, weight, starts)
        return triton_moe.expert_linear(x, weight, starts)

    def pack_linear(self, linear: LinearWeights, dtype: torch.dtype) -> PackedLinear | None:
        """See `kernels.decoder.pack_linear`: weights in 8 and 4 bits, and in GGUF's blocks."""
        return triton_quantized.pack_linear(linear, dtype)

    def choose(
        self, logits: Tensor, rows: SamplingRows, bitmask: Tensor | None, scratch: Scratch
    ) -> tuple[Tensor, Tensor]:
        """See `reference.choose`."""
        width = triton_sampling.CHUNK * triton_sampling.MOST_CHUNKS
        if logits.dtype is not torch.float32 or logits.stride(1) != 1 or logits.shape[1] > width:
            return reference.choose(logits, rows, bitmask, scratch)
        return triton_sampling.choose(logits, rows, bitmask)


def _dense_heads(x: Tensor) -> bool:
    """Whether the heads of each token are contiguous. The tokens may be strided."""
    return x.stride()[1:] == (x.shape[2], 1)
