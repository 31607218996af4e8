"""Does a kernel give the same bits each time, while the memory is busy with other work?

A missing wait or fence shows as bits that differ, which one comparison within a tolerance may not see. All
kernels are deterministic by design: there are no atomics.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from personae.evals.bench.gpu.checks import Check
from personae.evals.bench.gpu.shapes import (
    DIM,
    GROUPS,
    HEADS,
    HIDDEN,
    KV_HEADS,
    PAGE,
    VOCAB,
    attention_batch,
    make_adapters,
    noise,
    sampling_rows,
    work_list,
)
from personae.kernels.masks import Scratch
from personae.kernels.reference import FP8

Operators = dict[str, Callable[..., Any]]
Again = Callable[[], Tensor]
REPEATS = 100
BUSY = 1 << 27  # bytes that are copied while a kernel runs
LONG = 2048  # tokens of a prompt


def repeat_checks(operators: Operators, generator: torch.Generator, *, fp8: bool) -> Iterator[Check]:
    """The share of repetitions with other bits than the first result."""
    heap = [torch.empty(BUSY, dtype=torch.uint8, device=generator.device) for _ in range(2)]
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own annotation is missing
    for name, again in _cases(operators, generator, fp8=fp8):
        first = again().clone()
        torch.cuda.synchronize()
        wrong = torch.zeros((), dtype=torch.int64, device=generator.device)
        for _ in range(REPEATS):
            with torch.cuda.stream(beside):
                heap[1].copy_(heap[0])
            # A comparison of bits; one of values would take NaN for another value.
            wrong += (again().view(torch.uint8) != first.view(torch.uint8)).any()
        share = float(wrong) / REPEATS
        yield Check(f"the same bits again, {name}", share if bool(first.isfinite().all()) else torch.nan, 0.0)


def _cases(operators: Operators, generator: torch.Generator, *, fp8: bool) -> Iterator[tuple[str, Again]]:
    decode = [(1, 2 * LONG + 37 * row) for row in range(32)]
    prompts = [(LONG, LONG), (300, LONG + 952), (1, 500)]
    mixed = (*[0] * 700, None, *[1] * 300)
    attention, adapters = partial(_attention, operators, generator), partial(_adapters, operators, generator)
    yield "decode", attention(decode)
    yield "prompts", attention(prompts)
    yield "prompts with a window", attention(prompts, window=700)
    yield "prompts in float16", attention(prompts[:1], torch.float16)
    if fp8:
        yield "decode, keys and values in fp8", attention(decode, kept=FP8)
        yield "prompts, keys and values in fp8", attention(prompts, kept=FP8)
    yield "64 adapters", adapters((16,) * 64, tuple(range(64)))
    yield "adapters of prompts", adapters((16, 64), mixed)
    yield "adapters of prompts, many inputs", adapters((16, 64), mixed, group="down")
    yield "adapters of prompts in float16", adapters((16, 64), mixed, torch.float16)
    yield "experts", _experts(operators, generator)
    rows, logits = sampling_rows(64, 7), 3 * noise((64, VOCAB), torch.float32, generator)
    scratch = Scratch(generator.device)
    yield "tokens", lambda: operators["choose"](logits.clone(), rows, None, scratch)[0]


def _attention(
    operators: Operators,
    generator: torch.Generator,
    rows: list[tuple[int, int]],
    dtype: torch.dtype = torch.bfloat16,
    kept: torch.dtype | None = None,
    window: int | None = None,
) -> Again:
    batch, pages = attention_batch(rows, generator.device, seed=3)
    caches = noise((2, pages, KV_HEADS, PAGE, DIM), dtype, generator).to(kept or dtype)
    q = noise((len(batch.write_index), HEADS, DIM), dtype, generator)
    return lambda: operators["paged_attention"](q, caches[0], caches[1], batch, DIM**-0.5, window)


def _adapters(
    operators: Operators,
    generator: torch.Generator,
    ranks: tuple[int, ...],
    rows: tuple[int | None, ...],
    dtype: torch.dtype = torch.bfloat16,
    group: str = "qkv",
) -> Again:
    inputs, outputs = GROUPS[group]
    made = make_adapters(ranks, 1, dtype, generator, {group: (inputs, outputs)})
    x = noise((len(rows), inputs), dtype, generator)
    before = noise((len(rows), sum(outputs)), dtype, generator)
    work = work_list(rows, len(rows) + 2, generator.device)

    def again() -> Tensor:
        y = before.clone()
        slices = torch.split(y, list(outputs), 1)
        operators["sgmv"](x, slices, made.weight_pools[group][0], made.tables[group], replace(work, plans={}))
        return y

    return again


def _experts(operators: Operators, generator: torch.Generator) -> Again:
    chosen = torch.randint(8, (LONG,), generator=generator, device=generator.device).sort().values
    starts = torch.searchsorted(chosen, torch.arange(9, device=generator.device), out_int32=True)
    x = noise((LONG, HIDDEN), torch.bfloat16, generator)
    weight = noise((8, 256, HIDDEN), torch.bfloat16, generator)
    return lambda: operators["expert_linear"](x, weight, starts)
