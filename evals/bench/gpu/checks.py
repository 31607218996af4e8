"""Are the kernels right? Each is compared with its reference in float64 (attention: float32), on new random
inputs.

The error is |ours - truth| / |truth|, with norms over the whole output. Memory that the kernels should not
read is NaN, and so is their output before they write it. So a wrong read or a missing write gives NaN and
fails.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from personae.evals.bench.gpu.layer import BenchLayer, BenchStep, step_inputs
from personae.evals.bench.gpu.shapes import (
    DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    PAGE,
    VOCAB,
    attention_batch,
    make_adapters,
    noise,
    sampling_rows,
    work_list,
)
from personae.kernels import reference
from personae.kernels.masks import Scratch
from personae.kernels.sgmv import WeightPool
from personae.kernels.side_stream import SideStream

LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}  # what is served first, first
Operators = dict[str, Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison. error: NaN if the output has NaN."""

    name: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the error is a number within the limit."""
        return self.error <= self.limit


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within the block torch.empty returns NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def relative_error(ours: Tensor, truth: Tensor) -> float:
    """|ours - truth| / |truth|; NaN if anything is NaN."""
    return float((ours.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-30))


SGMV_CASES: dict[str, tuple[tuple[int, ...], tuple[int | None, ...]]] = {
    "one row": ((16,), (0,)),
    "one adapter": ((64,), (0,) * 33),
    "all different": ((16,) * 32, tuple(range(32))),
    "mixed ranks and base rows": ((0, 1, 8, 64, 13), (None, 0, 1, 1, 2, *[3] * 20, 4, None)),
    "prefill": ((16, 64), (*[0] * 300, None, *[1] * 77, 0)),
}


def sgmv_checks(
    operators: Operators, dtype: torch.dtype, generator: torch.Generator, width: int = HIDDEN
) -> Iterator[Check]:
    """Every case of popularity, over three modules at once, as strided slices of one tensor."""
    for name, (ranks, rows) in SGMV_CASES.items():
        outputs = (width, width // 4, width // 4)
        adapters = make_adapters(ranks, 1, dtype, generator, {"qkv": (width, outputs)})
        weight_pools, tables = adapters.weight_pools["qkv"][0], adapters.tables["qkv"]
        work = work_list(rows, len(rows) + 2, generator.device)
        x = noise((len(rows), width), dtype, generator)
        y = noise((len(rows), sum(outputs)), dtype, generator)
        truth = y.double()
        wide = tuple(
            WeightPool(weight_pool.a.double(), weight_pool.b.double()) for weight_pool in weight_pools
        )
        reference.sgmv(x.double(), torch.split(truth, list(outputs), 1), wide, tables, work)
        with poisoned_memory():
            operators["sgmv"](x, torch.split(y, list(outputs), 1), weight_pools, tables, work)
        yield Check(f"sgmv, {name}, {dtype}", relative_error(y, truth), LIMITS[dtype])


ATTENTION_CASES: dict[str, list[tuple[int, int]]] = {
    "decode": [(1, 1), (1, 17), (1, 1000), (1, 256), (1, 5000)],
    "prefill": [(300, 300), (64, 64), (7, 7)],
    "mixed": [(1, 3000), (200, 900), (1, 5), (13, 2100), (1, 64)],
}


def attention_checks(
    operators: Operators,
    dtype: torch.dtype,
    generator: torch.Generator,
    shrink: int = 1,
    kept: torch.dtype | None = None,
) -> Iterator[Check]:
    """Every mix of rows with and without a window. shrink: divides lengths, for slow machines. kept: the
    cache's dtype, if it differs."""
    for name, full in ATTENTION_CASES.items():
        rows = [(max(1, q // shrink), max(1, q // shrink, kv // shrink)) for q, kv in full]
        for window in (None, 100):
            batch, num_pages = attention_batch(rows, generator.device, seed=len(rows))
            caches = torch.full(
                (2, num_pages, KV_HEADS, PAGE, DIM), torch.nan, dtype=kept or dtype, device=generator.device
            )
            whole, _ = attention_batch([(kv, kv) for _, kv in rows], generator.device, seed=len(rows))
            total = len(whole.write_index)
            k, v = (noise((total, KV_HEADS, DIM), dtype, generator) for _ in "kv")
            with poisoned_memory():
                operators["append_kv"](k, v, caches[0], caches[1], whole.write_index)
            q = noise((len(batch.write_index), HEADS, DIM), dtype, generator)
            truth = reference.paged_attention(
                q.float(), caches[0].float(), caches[1].float(), batch, DIM**-0.5, window
            )
            with poisoned_memory():
                ours = operators["paged_attention"](q, caches[0], caches[1], batch, DIM**-0.5, window)
            limit = LIMITS[dtype] if dtype is not torch.float32 else 1e-4
            label = f"attention, {name}, window {window}, {dtype}" + (f", kept as {kept}" if kept else "")
            yield Check(label, relative_error(ours, truth), limit)


def expert_checks(
    operators: Operators, dtype: torch.dtype, generator: torch.Generator, width: int = HIDDEN
) -> Iterator[Check]:
    """Rows of a decode step and of a prompt, grouped by expert; one in three experts has none."""
    for rows, experts in ((24, 64), (2000, 8)):
        shares = torch.rand(experts, generator=generator, device=generator.device)
        shares[::3] = 0
        chosen = torch.multinomial(shares, rows, replacement=True, generator=generator).sort().values
        bounds = torch.arange(experts + 1, device=generator.device)
        starts = torch.searchsorted(chosen, bounds, out_int32=True)
        x, weight = noise((rows, width), dtype, generator), noise((experts, 200, width), dtype, generator)
        with poisoned_memory():
            ours = operators["expert_linear"](x, weight, starts)
        truth = reference.expert_linear(x.double(), weight.double(), starts)
        yield Check(f"expert_linear, {rows} rows, {dtype}", relative_error(ours, truth), LIMITS[dtype])


def pointwise_checks(operators: Operators, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Check]:
    """Norms, rotation and activation of 33 tokens."""
    tokens, eps = 33, 1e-5
    x, residual = (noise((tokens, HIDDEN), dtype, generator) for _ in "xr")
    weight = noise((HIDDEN,), torch.float32, generator)
    total = residual + x
    with poisoned_memory():
        normed = operators["rms_norm"](x, weight, eps)
        added, kept = operators["add_rms_norm"](x, residual, weight, eps)
        wide = noise((tokens, 2 * INNER), dtype, generator)
        silu, gelu = operators["silu_and_mul"](wide), operators["gelu_and_mul"](wide)
    yield Check(f"rms_norm, {dtype}", relative_error(normed, _norm(x, weight, eps)), LIMITS[dtype])
    yield Check(f"add_rms_norm, {dtype}", relative_error(added, _norm(total, weight, eps)), LIMITS[dtype])
    yield Check(f"add_rms_norm's sum, {dtype}", relative_error(kept, total), 0.0)
    gate, up = wide.double().chunk(2, 1)
    truth = gate / (1 + (-gate).exp()) * up
    yield Check(f"silu_and_mul, {dtype}", relative_error(silu, truth), LIMITS[dtype])
    truth = functional.gelu(gate, approximate="tanh") * up
    yield Check(f"gelu_and_mul, {dtype}", relative_error(gelu, truth), LIMITS[dtype])

    angles = torch.rand(4096, DIM // 2, generator=generator, device=generator.device) * 2 * math.pi
    positions = torch.randint(0, 4096, (tokens,), generator=generator, device=generator.device)
    q, k = (noise((tokens, heads, DIM), dtype, generator) for heads in (HEADS, KV_HEADS))
    wanted = q.double(), k.double()
    turn = torch.polar(torch.ones_like(angles).double(), angles.double())[positions].unsqueeze(1)
    for part in wanted:
        first, second = part.chunk(2, -1)
        turned = torch.complex(first, second) * turn
        part.copy_(torch.cat((turned.real, turned.imag), -1))
    operators["rotary"](q, k, positions, angles.cos(), angles.sin())
    for name, ours, part in zip("qk", (q, k), wanted, strict=True):
        yield Check(f"rotary of {name}, {dtype}", relative_error(ours, part), LIMITS[dtype])


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def sampling_checks(operators: Operators, generator: torch.Generator, width: int = VOCAB) -> Iterator[Check]:
    """The share of 64 rows whose token differs from the reference's, and the error of their largest logits.

    A token at an edge may differ (see `reference.choose`): one row of the 64 is tolerated.
    """
    seed = int(torch.randint(1 << 31, (), generator=generator, device=generator.device))
    rows = sampling_rows(64, seed)
    logits = 3 * noise((64, width), torch.float32, generator)
    words = np.random.default_rng(width).integers(-(2**31), 2**31, (64, -(-width // 32)), np.int32)
    for name, bitmask in {"no masks": None, "masks": torch.from_numpy(words)}.items():
        scratch = Scratch(generator.device)
        wanted, best = reference.choose(logits.clone(), rows, bitmask, scratch)
        with poisoned_memory():
            tokens, ours = operators["choose"](logits.clone(), rows, bitmask, scratch)
        differ = float((tokens != wanted).double().mean())
        yield Check(f"choose, tokens, {name}", differ, 1 / 64)
        yield Check(f"choose, largest logits, {name}", relative_error(ours, best), 0.0)


def graph_checks(operators: Operators, generator: torch.Generator) -> Iterator[Check]:
    """One captured graph, replayed with fewer and with more adapters than at its capture."""
    device, dtype, rows = generator.device, torch.bfloat16, 16
    adapters = make_adapters((16, 8, 64, 1), 1, dtype, generator, {"o": (HIDDEN, (HIDDEN,))})
    weight_pools, tables = adapters.weight_pools["o"][0], adapters.tables["o"]
    x, y = noise((rows, HIDDEN), dtype, generator), noise((rows, HIDDEN), dtype, generator)
    before = y.clone()
    mixes: dict[str, tuple[int | None, ...]] = {
        "fewer": (*[2] * 3, *[None] * 13),
        "more": tuple(range(4)) * 4,
        "none": (None,) * rows,
    }
    work = work_list((0,) * 8 + (1,) * 8, rows, device)
    operators["sgmv"](x, (y,), weight_pools, tables, work_list((0,) * 8 + (1,) * 8, rows, device))  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operators["sgmv"](x, (y,), weight_pools, tables, work)
    for name, mix in mixes.items():
        live = work_list(mix, rows, device)
        for captured, new in ((work.first_row, live.first_row), (work.rows, live.rows)):
            captured.copy_(new)
        work.adapter.copy_(live.adapter)
        y.copy_(before)
        truth = before.clone()
        reference.sgmv(x, (truth,), weight_pools, tables, live)
        graph.replay()
        yield Check(f"sgmv, graph replayed with {name} adapters", relative_error(y, truth), LIMITS[dtype])


def step_graph_checks(generator: torch.Generator) -> Iterator[Check]:
    """A layer of a decode step captured once, with shrink after the product and in parallel with it, replayed
    with other adapters, lengths and positions."""
    rows, dtype = 16, torch.bfloat16
    batch, num_pages = attention_batch([(1, 900)] * rows, generator.device, seed=4)
    layers, inputs = [BenchLayer(num_pages, generator)], step_inputs(rows, 900, generator)
    adapters = make_adapters((16, 8, 64, 1), 1, dtype, generator)
    work = work_list((0,) * 8 + (1,) * 8, rows, generator.device)
    for how, side_stream in {"behind": None, "beside": SideStream()}.items():
        step = BenchStep(layers, batch, adapters, work, side_stream)
        step.run(*inputs)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step.run(*inputs)
        for name, mix, length in (("fewer", (2, *[None] * 15), 40), ("more", tuple(range(4)) * 4, 900)):
            live = work_list(mix, rows, generator.device)
            for captured, new in ((work.first_row, live.first_row), (work.rows, live.rows)):
                captured.copy_(new)
            work.adapter.copy_(live.adapter)
            batch.kv_length.fill_(length)
            inputs[2].fill_(length - 1)
            graph.replay()
            once = BenchStep(layers, batch, adapters, live).run(*inputs)
            error = relative_error(found, once)
            yield Check(f"step, shrink {how}, graph replayed with {name} adapters", error, LIMITS[dtype])
