"""The C++ operators with the reference's signatures. They pass unsupported inputs (float16) to the
reference."""

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from personae.kernels import reference, reference_latent
from personae.kernels.attention import AttentionBatch, AttentionShape
from personae.kernels.attention_backend import AttentionBackend, AttentionPlan, ReferenceAttention
from personae.kernels.counter_rng import uniforms
from personae.kernels.latent_attention import LatentPlan
from personae.kernels.masks import Scratch
from personae.kernels.registry import OPERATORS, Implementation
from personae.kernels.sampling import SamplingRows
from personae.kernels.sgmv import RANK_PAGE, RankTable, WeightPool, WorkList

TYPES = {torch.float32: 0, torch.bfloat16: 1}
DTYPES = frozenset(TYPES)
MAX_GROUP = 32  # query heads that share a key/value head


class _Attention(ctypes.Structure):
    _fields_ = (
        *(
            (name, c_void_p)
            for name in ("q", "k_cache", "v_cache", "out", "query_start", "kv_length", "page_table")
        ),
        *((name, c_int64) for name in ("rows", "heads", "kv_heads", "dim", "page_size", "max_pages")),
        ("q_stride", c_int64),
        ("page_stride", c_int64),
        ("scale", c_float),
        ("window", c_int64),
        ("int8", c_int64),
    )


class _LatentAttention(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("q", "cache", "out", "row", "seen", "page_table")),
        *((name, c_int64) for name in ("tokens", "heads", "dim", "latent", "page_size", "max_pages")),
        ("page_stride", c_int64),
        ("scale", c_float),
        ("int8", c_int64),
    )


class _Module(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("y", "a", "b", "rank", "pages")),
        *((name, c_int64) for name in ("out", "y_stride", "max_pages")),
    )


class _Sgmv(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "first_row", "rows", "adapter")),
        *((name, c_int64) for name in ("segments", "inputs", "x_stride", "rank_page", "modules")),
        ("module", _Module * 4),
    )


class _SamplingColumns(ctypes.Structure):
    _fields_ = tuple((name, c_void_p) for name in ("temperature", "top_k", "top_p", "min_p", "uniform"))


class CpuAttention(AttentionBackend):
    """A plan is the call without the layer's arguments."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.personae_paged_attention
        self._reference = ReferenceAttention()

    def plan(self, batch: AttentionBatch, shape: AttentionShape) -> AttentionPlan:
        """See AttentionBackend."""
        code = TYPES.get(shape.dtype)
        int8 = shape.kv_dtype is torch.int8
        if (
            code is None
            or not (int8 or shape.kv_dtype is shape.dtype)
            or shape.heads > MAX_GROUP * shape.kv_heads
        ):
            return self._reference.plan(batch, shape)
        call = _Attention(
            query_start=batch.query_start.data_ptr(),
            kv_length=batch.kv_length.data_ptr(),
            page_table=batch.page_table.data_ptr(),
            rows=batch.kv_length.shape[0],
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            dim=shape.head_dim,
            page_size=shape.page_size,
            max_pages=batch.page_table.shape[1],
            int8=int8,
        )

        def run(q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, window: int | None) -> Tensor:
            out = torch.empty(q.shape, dtype=q.dtype)
            call.q, call.k_cache, call.v_cache = q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()
            call.out, call.q_stride, call.page_stride = out.data_ptr(), q.stride(0), k_cache.stride(0)
            call.scale, call.window = scale, window or 0
            self._run(code, ctypes.byref(call))
            return out

        return run


class CpuOperators:
    """Calls the compiled library. Heads and features must be contiguous; tokens may be strided."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.paged_attention = CpuAttention(library)
        self._latent = library.personae_latent_attention
        self._append = library.personae_append_kv
        self._append_int8 = library.personae_append_kv_int8
        for append in (self._append, self._append_int8):
            append.argtypes = [ctypes.c_int, *[c_void_p] * 5, *[c_int64] * 7]
        self._sgmv = library.personae_sgmv
        self._rms_norm = library.personae_rms_norm
        self._rms_norm.argtypes = [ctypes.c_int, *[c_void_p] * 5, *[c_int64] * 5, c_float]
        self._rotary = library.personae_rotary
        self._rotary.argtypes = [ctypes.c_int, *[c_void_p] * 4, *[c_int64] * 5]
        self._silu = library.personae_silu_and_mul
        self._gelu = library.personae_gelu_and_mul
        for gate in (self._silu, self._gelu):
            gate.argtypes = [ctypes.c_int, *[c_void_p] * 2, *[c_int64] * 3]
        self._choose = library.personae_choose
        self._choose.argtypes = [*[c_void_p] * 2, *[c_int64] * 4, *[c_void_p] * 3, c_int]

    def by_name(self) -> dict[str, Implementation]:
        """The operators under the reference's names."""
        names = (*OPERATORS, "latent_attention")
        return {name: Implementation(getattr(self, name), DTYPES) for name in names}

    def latent_attention(self, q: Tensor, cache: Tensor, plan: LatentPlan, scale: float) -> Tensor:
        """See `reference_latent.latent_attention`."""
        code = TYPES.get(q.dtype)
        if code is None or cache.dtype not in (q.dtype, torch.int8) or not q.is_contiguous():
            return reference_latent.latent_attention(q, cache, plan, scale)
        row, seen = plan.by_token
        table = plan.batch.page_table
        out = torch.empty(*q.shape[:2], plan.latent, dtype=q.dtype)
        call = _LatentAttention(
            q=q.data_ptr(),
            cache=cache.data_ptr(),
            out=out.data_ptr(),
            row=row.data_ptr(),
            seen=seen.data_ptr(),
            page_table=table.data_ptr(),
            tokens=len(q),
            heads=q.shape[1],
            dim=q.shape[2],
            latent=plan.latent,
            page_size=cache.shape[2],
            max_pages=table.shape[1],
            page_stride=cache.stride(0),
            scale=scale,
            int8=cache.dtype is torch.int8,
        )
        self._latent(code, ctypes.byref(call))
        return out

    def append_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, write_index: Tensor) -> None:
        """See `reference.append_kv`."""
        code = TYPES.get(k.dtype)
        if code is None or k_cache.dtype not in (k.dtype, torch.int8):
            reference.append_kv(k, v, k_cache, v_cache, write_index)
            return
        tokens, heads, dim = k.shape
        (self._append_int8 if k_cache.dtype is torch.int8 else self._append)(
            code,
            k.data_ptr(),
            v.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            write_index.data_ptr(),
            tokens,
            heads,
            dim,
            k_cache.shape[2],
            k.stride(0),
            v.stride(0),
            k_cache.stride(0),
        )

    def sgmv(
        self,
        x: Tensor,
        ys: tuple[Tensor, ...],
        weight_pools: tuple[WeightPool, ...],
        tables: tuple[RankTable, ...],
        work: WorkList,
    ) -> None:
        """See `reference.sgmv`."""
        code = TYPES.get(x.dtype)
        if code is None:
            reference.sgmv(x, ys, weight_pools, tables, work)
            return
        modules = [
            _Module(
                y.data_ptr(),
                weight_pool.a.data_ptr(),
                weight_pool.b.data_ptr(),
                table.rank.data_ptr(),
                table.pages.data_ptr(),
                y.shape[1],
                y.stride(0),
                table.pages.shape[1],
            )
            for y, weight_pool, table in zip(ys, weight_pools, tables, strict=True)
        ]
        call = _Sgmv(
            x.data_ptr(),
            work.first_row.data_ptr(),
            work.rows.data_ptr(),
            work.adapter.data_ptr(),
            work.rows.shape[0],
            x.shape[1],
            x.stride(0),
            RANK_PAGE,
            len(modules),
            (_Module * 4)(*modules),
        )
        self._sgmv(code, ctypes.byref(call))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `reference.rms_norm`."""
        return self._norm(x, None, weight, eps)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `reference.add_rms_norm`."""
        y, total = self._norm(x, residual, weight, eps)
        assert total is not None
        return y, total

    def _norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor | None]:
        code = TYPES.get(x.dtype)
        if code is None or x.dim() > 3 or (residual is not None and not residual.is_contiguous()):
            summed = x if residual is None else residual + x
            return reference.rms_norm(summed, weight, eps), summed
        y = torch.empty(x.shape, dtype=x.dtype)
        total = None if residual is None else torch.empty(x.shape, dtype=x.dtype)
        weight = weight.float()
        outer, inner = (x.shape[0], 1) if x.dim() < 3 else x.shape[:2]
        self._rms_norm(
            code,
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            y.data_ptr(),
            None if total is None else total.data_ptr(),
            outer,
            inner,
            x.shape[-1],
            x.stride(0),
            x.stride(1) if x.dim() == 3 else 0,
            eps,
        )
        return y, total

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """See `reference.rotary`."""
        code = TYPES.get(q.dtype)
        if code is None:
            reference.rotary(q, k, positions, cos, sin)
            return
        for x in (q, k):
            tokens, heads, dim = x.shape
            self._rotary(
                code,
                x.data_ptr(),
                positions.data_ptr(),
                cos.data_ptr(),
                sin.data_ptr(),
                tokens,
                heads,
                dim,
                x.stride(0),
                x.stride(1),
            )

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """See `reference.silu_and_mul`."""
        return self._gated(self._silu, x) if x.dtype in TYPES else reference.silu_and_mul(x)

    def gelu_and_mul(self, x: Tensor) -> Tensor:
        """See `reference.gelu_and_mul`."""
        return self._gated(self._gelu, x) if x.dtype in TYPES else reference.gelu_and_mul(x)

    def _gated(self, function: Callable[..., None], x: Tensor) -> Tensor:
        tokens, inner = x.shape[0], x.shape[1] // 2
        y = torch.empty(tokens, inner, dtype=x.dtype)
        function(TYPES[x.dtype], x.data_ptr(), y.data_ptr(), tokens, inner, x.stride(0))
        return y

    def choose(
        self, logits: Tensor, rows: SamplingRows, bitmask: Tensor | None, scratch: Scratch
    ) -> tuple[Tensor, Tensor]:
        """See `reference.choose`. The logits are not changed."""
        if logits.dtype is not torch.float32 or logits.stride(1) != 1:
            return reference.choose(logits, rows, bitmask, scratch)
        if bitmask is not None and bitmask.stride(1) != 1:
            bitmask = bitmask.contiguous()
        count, vocab = logits.shape
        tokens = torch.empty(count, dtype=torch.int64)
        best = torch.empty(count)
        drawn = rows.temperature.any()  # otherwise the numbers are not read
        numbers = uniforms(rows.streams, rows.positions) if drawn else np.empty(count)
        call = _SamplingColumns(
            rows.temperature.ctypes.data,
            rows.top_k.ctypes.data,
            rows.top_p.ctypes.data,
            rows.min_p.ctypes.data,
            numbers.ctypes.data,
        )
        self._choose(
            logits.data_ptr(),
            None if bitmask is None else bitmask.data_ptr(),
            count,
            vocab,
            logits.stride(0),
            0 if bitmask is None else bitmask.stride(0),
            ctypes.byref(call),
            tokens.data_ptr(),
            best.data_ptr(),
            torch.get_num_threads(),
        )
        return tokens, best
