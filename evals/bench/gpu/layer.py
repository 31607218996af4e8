"""One decoder layer of the 8B shape, made of our kernels and cuBLAS, with its own weights."""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from personae.evals.bench.gpu.shapes import (
    DIM,
    GROUPS,
    HEADS,
    HIDDEN,
    KV,
    KV_HEADS,
    PAGE,
    Adapters,
    noise,
)
from personae.kernels.attention import AttentionBatch, AttentionShape
from personae.kernels.attention_backend import attention_backend
from personae.kernels.operators import add_rms_norm, append_kv, rotary, silu_and_mul
from personae.kernels.sgmv import WorkList
from personae.kernels.sgmv_calls import sgmv_calls
from personae.kernels.side_stream import SideStream


class BenchLayer:
    """The weights and the cache of one layer, random."""

    def __init__(self, num_pages: int, generator: torch.Generator) -> None:
        dtype = torch.bfloat16
        self.weights = {
            group: noise((sum(outputs), inputs), dtype, generator) * inputs**-0.5
            for group, (inputs, outputs) in GROUPS.items()
        }
        self.norms = [noise((HIDDEN,), torch.float32, generator) for _ in range(2)]
        self.caches = noise((2, num_pages, KV_HEADS, PAGE, DIM), dtype, generator)


class BenchStep:
    """One step through some layers: x and residual [T, HIDDEN], positions [T] int64, tables [P, DIM / 2].

    If there are fewer adapter layers than layers, they alternate. side_stream: shrink runs there, in parallel
    with the base's products; without one it runs after them.
    """

    def __init__(
        self,
        layers: list[BenchLayer],
        batch: AttentionBatch,
        adapters: Adapters | None,
        work: WorkList | None,
        side_stream: SideStream | None = None,
    ) -> None:
        self.layers, self.batch, self.adapters, self.work = layers, batch, adapters, work
        self.side_stream = side_stream
        self._begin_sgmv = sgmv_calls(batch.kv_length.device, torch.bfloat16)
        backend = attention_backend(batch.kv_length.device, torch.bfloat16)
        self._plan = partial(
            backend.plan, shape=AttentionShape(HEADS, KV_HEADS, DIM, PAGE, *[torch.bfloat16] * 2)
        )

    def run(self, x: Tensor, residual: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """All layers, one after the other, as the engine runs them.

        Each run plans its adapters and its attention again, as each step does: a captured run has the plans
        in its graph.
        """
        attend = self._plan(self.batch)
        work = None if self.work is None else replace(self.work, plans={})
        for index, layer in enumerate(self.layers):
            normed, residual = add_rms_norm(x, residual, layer.norms[0], 1e-5)
            merged = self._linear(work, index, "qkv", normed)
            q, k, v = torch.split(merged, [HIDDEN, KV, KV], 1)
            q, k, v = q.view(-1, HEADS, DIM), k.view(-1, KV_HEADS, DIM), v.view(-1, KV_HEADS, DIM)
            rotary(q, k, positions, cos, sin)
            append_kv(k, v, layer.caches[0], layer.caches[1], self.batch.write_index)
            mixed = attend(q, layer.caches[0], layer.caches[1], DIM**-0.5, None)
            mixed = self._linear(work, index, "o", mixed.flatten(1))
            normed, residual = add_rms_norm(mixed, residual, layer.norms[1], 1e-5)
            x = self._linear(work, index, "down", silu_and_mul(self._linear(work, index, "gate_up", normed)))
        return x

    def _linear(self, work: WorkList | None, index: int, group: str, x: Tensor) -> Tensor:
        weight = self.layers[index].weights[group]
        if self.adapters is None or work is None:
            return F.linear(x, weight)
        weight_pools, tables = self.adapters.weight_pools[group], self.adapters.tables[group]
        finish = self._begin_sgmv(x, weight_pools[index % len(weight_pools)], tables, work, self.side_stream)
        y = F.linear(x, weight)
        finish(torch.split(y, list(GROUPS[group][1]), 1))
        return y


def step_inputs(tokens: int, keys: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """What `Step.run` takes, for tokens at position keys - 1."""
    x, residual = (noise((tokens, HIDDEN), torch.bfloat16, generator) for _ in "xr")
    positions = torch.full((tokens,), keys - 1, device=generator.device)
    angles = torch.rand(keys, DIM // 2, generator=generator, device=generator.device)
    return x, residual, positions, angles.cos(), angles.sin()
