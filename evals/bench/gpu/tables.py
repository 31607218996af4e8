"""The tables: a decode step with adapters compared with the same step without, attention, and the other
kernels.

A row's `ROOFLINE` is the least time that its bytes and operations take on this device, over the time that was
measured.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from personae.evals.bench.gpu.few_bits import PLAIN, bench_linear, kinds
from personae.evals.bench.gpu.goals import ROOFLINE, SLOWER
from personae.evals.bench.gpu.layer import BenchLayer, BenchStep, step_inputs
from personae.evals.bench.gpu.peers import vllm_attention, vllm_lora
from personae.evals.bench.gpu.shapes import (
    DIM,
    GROUPS,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    PAGE,
    VOCAB,
    WEIGHT_BYTES,
    Adapters,
    Mix,
    attention_batch,
    make_adapters,
    mixes,
    noise,
    sampling_rows,
    work_list,
)
from personae.evals.bench.gpu.timing import Call, Deadline, Roofline, event_time, replay_time
from personae.kernels import reference
from personae.kernels.attention import AttentionBatch
from personae.kernels.masks import Scratch
from personae.kernels.operators import add_rms_norm, choose, paged_attention, sgmv, silu_and_mul
from personae.kernels.sampling import SamplingRows
from personae.kernels.sgmv import WorkList
from personae.kernels.side_stream import SideStream

ReportRow = dict[str, Any]
CONTEXT = 1024
COPIES = 4  # layers with different weights: 1.7 GB, far more than the cache
NOBODY = "none, by the graph for adapters (the engine has one without)"
CUDA = torch.device("cuda")


def step_table(roofline: Roofline, generator: torch.Generator, deadline: Deadline) -> Iterator[ReportRow]:
    """Decode steps with context 1024: per layer, the base alone and with adapters on all seven modules;
    shrink in parallel with the base's products as in the engine's graphs, and after them on one stream.

    As many layers as the model has share a few layers' weights. So work that a step does once (its plans) has
    its real share, and weights are cold.
    """
    side_stream = SideStream()
    for batch in (1, 16, 64):
        attention, num_pages = attention_batch([(1, CONTEXT)] * batch, CUDA, seed=batch)
        few = [BenchLayer(num_pages, generator) for _ in range(COPIES)]
        layers = [few[index % COPIES] for index in range(LAYERS)]
        inputs = step_inputs(batch, CONTEXT, generator)
        alone = BenchStep(layers, attention, None, None)
        base = replay_time([partial(alone.run, *inputs)]) / LAYERS
        base_bytes = WEIGHT_BYTES + 2 * 2 * batch * CONTEXT * KV_HEADS * DIM
        floor = roofline.floor(base_bytes, batch * WEIGHT_BYTES)  # two bytes and two operations a weight
        yield {"rows": batch, "adapters": "none", "us a layer": base, ROOFLINE: floor / base}
        for mix in [Mix(NOBODY, (None,) * batch, (16,)), *mixes(batch, seed=1)]:
            if deadline.passed:
                yield {"rows": batch, "adapters": mix.name, "left out": "no time left"}
                continue
            adapters = make_adapters(mix.ranks, COPIES, torch.bfloat16, generator)
            work = work_list(mix.rows, batch, CUDA)
            time, behind = (
                replay_time([partial(BenchStep(layers, attention, adapters, work, own).run, *inputs)])
                / LAYERS
                for own in (side_stream, None)
            )
            row = {"rows": batch, "adapters": mix.name, "us a layer": time, SLOWER: slower(time, base)}
            row["shrink behind, slower by %"] = slower(behind, base)
            row["floor %"] = 100 * roofline.floor(mix.lora_bytes) / base
            row[ROOFLINE] = roofline.floor(base_bytes + mix.lora_bytes, batch * WEIGHT_BYTES) / time
            yield row
            del adapters
        del few, layers, alone
        torch.cuda.empty_cache()


def slower(time: float, base: float) -> float:
    """How much longer than the base, in percent."""
    return 100 * (time / base - 1)


def sgmv_table(roofline: Roofline, generator: torch.Generator, deadline: Deadline) -> Iterator[ReportRow]:
    """SGMV alone, all four groups of a layer, compared with cuBLAS in a loop over adapters and modules, and
    with vLLM's kernels."""
    for batch in (1, 16, 64):
        x = {
            group: noise((batch, inputs), torch.bfloat16, generator) for group, (inputs, _) in GROUPS.items()
        }
        ys = {
            group: noise((batch, sum(outputs)), torch.bfloat16, generator)
            for group, (_, outputs) in GROUPS.items()
        }
        for mix in mixes(batch, seed=1):
            if deadline.passed:
                yield {"rows": batch, "adapters": mix.name, "left out": "no time left"}
                continue
            copies = max(2, min(128, int(300e6 / mix.lora_bytes)))
            adapters = make_adapters(mix.ranks, copies, torch.bfloat16, generator)
            time = replay_time(sgmv_calls(adapters, work_list(mix.rows, batch, CUDA), copies, x, ys))
            row: ReportRow = {"rows": batch, "adapters": mix.name, "us a layer": time}
            row[ROOFLINE] = roofline.floor(mix.lora_bytes) / time
            row["torch, one by one us"] = replay_time(one_by_one(mix, x, ys, generator))
            row["vLLM us"] = vllm_lora(mix, copies, x, ys, generator)
            yield row
            del adapters


def sgmv_calls(
    adapters: Adapters, work: WorkList, copies: int, x: dict[str, Tensor], ys: dict[str, Tensor]
) -> list[Call]:
    """One call per layer: its four groups. The plan is made once, in the warm-up."""

    def call(layer: int) -> None:
        for group, (_, outputs) in GROUPS.items():
            slices = torch.split(ys[group], list(outputs), 1)
            sgmv(x[group], slices, adapters.weight_pools[group][layer], adapters.tables[group], work)

    return [partial(call, layer) for layer in range(copies)]


def one_by_one(
    mix: Mix, x: dict[str, Tensor], ys: dict[str, Tensor], generator: torch.Generator
) -> list[Call]:
    """Two layers of the same work in torch: of each adapter and module two products of cuBLAS, with dense
    weights of its own rank."""
    spans = {a: [row for row, own in enumerate(mix.rows) if own == a] for a in set(mix.rows) - {None}}

    def call(layer: dict[str, dict[int, list[tuple[Tensor, Tensor]]]]) -> None:
        for group, (_, outputs) in GROUPS.items():
            slices = torch.split(ys[group], list(outputs), 1)
            for adapter, pairs in layer[group].items():
                first, last = spans[adapter][0], spans[adapter][-1] + 1
                for y, (a, b) in zip(slices, pairs, strict=True):
                    y[first:last].addmm_(x[group][first:last] @ a, b)

    def layer() -> dict[str, dict[int, list[tuple[Tensor, Tensor]]]]:
        return {
            group: {
                adapter: [
                    (
                        noise((inputs, mix.ranks[adapter]), torch.bfloat16, generator) * inputs**-0.5,
                        noise((mix.ranks[adapter], out), torch.bfloat16, generator),
                    )
                    for out in outputs
                ]
                for adapter in spans
                if adapter is not None
            }
            for group, (inputs, outputs) in GROUPS.items()
        }

    return [partial(call, layer()) for _ in range(2)]


ATTENTION: dict[str, list[tuple[int, int]]] = {
    "1 row, context 1024": [(1, 1024)],
    "1 row, context 65536": [(1, 65536)],
    "16 rows, context 8192": [(1, 8192)] * 16,
    "64 rows, context 1024": [(1, 1024)] * 64,
    "64 rows, context 8192": [(1, 8192)] * 64,
    "32 rows, context 256 to 16384": [(1, 256 << (i % 7)) for i in range(32)],
    "prefill of 2048": [(2048, 2048)],
    "prefill of 512 after 8192": [(512, 8704)],
    "prefill of 1024 beside 32 rows, context 2048": [(1024, 1024), *[(1, 2048)] * 32],
}


def attention_table(
    roofline: Roofline, generator: torch.Generator, deadline: Deadline
) -> Iterator[ReportRow]:
    """One layer's attention, torch's own, which has no pages and takes only rows of one length, and
    vLLM's Triton kernel."""
    for name, rows in ATTENTION.items():
        if deadline.passed:
            yield {"batch": name, "left out": "no time left"}
            continue
        batch, num_pages = attention_batch(rows, CUDA, seed=3)
        size = 2 * num_pages * KV_HEADS * PAGE * DIM * 2
        copies = max(1, min(128, int(400e6 / size)))  # of short contexts as many as no cache holds
        caches = [
            noise((2, num_pages, KV_HEADS, PAGE, DIM), torch.bfloat16, generator) for _ in range(copies)
        ]
        q = noise((len(batch.write_index), HEADS, DIM), torch.bfloat16, generator)
        time = replay_time(attention_calls(q, caches, batch))
        moved = 4 * KV_HEADS * DIM * sum(keys for _, keys in rows)
        operations = 4 * HEADS * DIM * sum(n * keys - n * (n - 1) // 2 for n, keys in rows)
        yield {
            "batch": name,
            "us": time,
            ROOFLINE: roofline.floor(moved, operations) / time,
            "TFLOP/s": operations / time / 1e6,
            "torch SDPA us": sdpa(rows, copies, generator),
            "vLLM us": vllm_attention(q, caches, batch),
        }
        del caches


def sdpa(rows: list[tuple[int, int]], copies: int, generator: torch.Generator) -> float | None:
    """Microseconds of torch's scaled_dot_product_attention over dense keys and values; None where rows have
    several lengths, or a prompt follows earlier tokens."""
    (queries, keys), *others = set(rows)
    if others or queries not in (1, keys):
        return None
    dense = [noise((2, len(rows), KV_HEADS, keys, DIM), torch.bfloat16, generator) for _ in range(copies)]
    q = noise((len(rows), HEADS, queries, DIM), torch.bfloat16, generator)
    own = partial(F.scaled_dot_product_attention, is_causal=queries > 1, enable_gqa=True)
    return replay_time([partial(own, q, k, v) for k, v in dense])


def attention_calls(q: Tensor, caches: list[Tensor], batch: AttentionBatch) -> list[Call]:
    """One call per cache."""
    return [partial(paged_attention, q, c[0], c[1], batch, DIM**-0.5) for c in caches]


def product_table(roofline: Roofline, generator: torch.Generator, deadline: Deadline) -> Iterator[ReportRow]:
    """The products of a layer with weights in few bits, and cuBLAS's with plain weights."""
    for tokens in (1, 16, 64, 2048):
        x = {
            group: noise((tokens, inputs), torch.bfloat16, generator) for group, (inputs, _) in GROUPS.items()
        }
        for kind in (PLAIN, *kinds()):
            if deadline.passed:
                yield {"tokens": tokens, "weights": kind, "left out": "no time left"}
                continue
            calls: list[Call] = []
            size = 0
            for group, (inputs, outputs) in GROUPS.items():
                product, octets = bench_linear(kind, sum(outputs), inputs, generator)
                size += octets
                calls.append(partial(product, x[group]))
            time = len(calls) * replay_time(calls)
            floor = roofline.floor(size, tokens * WEIGHT_BYTES)
            yield {"tokens": tokens, "weights": kind, "us a layer": time, ROOFLINE: floor / time}
            del calls


def pointwise_table(roofline: Roofline, generator: torch.Generator) -> Iterator[ReportRow]:
    """The fused norm and the activation against the bytes they must move."""
    for tokens in (64, 2048):
        x, residual = (noise((tokens, HIDDEN), torch.bfloat16, generator) for _ in "xr")
        weight = noise((HIDDEN,), torch.float32, generator)
        wide = noise((tokens, 2 * INNER), torch.bfloat16, generator)
        norm = replay_time([partial(add_rms_norm, x, residual, weight, 1e-5)] * 8)
        gated = replay_time([partial(silu_and_mul, wide)] * 8)
        for name, time, moved in (
            ("add_rms_norm", norm, 8 * tokens * HIDDEN),
            ("silu_and_mul", gated, 6 * tokens * INNER),
        ):
            floor = roofline.floor(moved)
            yield {"tokens": tokens, "operator": name, "us": time, "floor us": floor, ROOFLINE: floor / time}


def sampling_table(roofline: Roofline, generator: torch.Generator) -> Iterator[ReportRow]:
    """Tokens from logits over 128256 ids, and torch's; copies of parameters and launches are included."""
    for count in (1, 64, 256):
        logits = 3 * noise((count, VOCAB), torch.float32, generator)
        spare, scratch = torch.empty_like(logits), Scratch(CUDA)
        copy = event_time(partial(spare.copy_, logits))
        for name, filtered in {"drawn": False, "with top_k, top_p, min_p": True}.items():
            rows = sampling_rows(count, 1, filtered)

            ours, torchs = (
                event_time(partial(_chosen, operator, logits, spare, rows, scratch)) - copy
                for operator in (choose, reference.choose)
            )
            yield {
                "rows": count,
                "tokens": name,
                "us": ours,
                "torch us": torchs,
                ROOFLINE: roofline.floor(4 * count * VOCAB) / max(ours, 1e-9),
            }


def _chosen(
    operator: Callable[..., object], logits: Tensor, spare: Tensor, rows: SamplingRows, scratch: Scratch
) -> None:
    operator(spare.copy_(logits), rows, None, scratch)
