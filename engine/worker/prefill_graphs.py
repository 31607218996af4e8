"""Steps with prompts of up to 512 tokens as graphs that are cut at attention.

A layer's products, norms and adapters depend only on the number of tokens, as in a decode step. Attention
depends on how long each row and its context are, and chooses tiles and splits by that. So what lies between
two layers' attention is one graph, and attention is launched between the graphs, on the step's own rows. A
layer costs the host one replay and attention.

There are graphs for a few numbers of tokens, with adapters and without. The work list of adapters is in
device memory, so any mix of them replays the same graphs. Padding tokens write to the KV cache's spare page
and nothing reads what they compute.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from personae.engine.kv import KVCache
from personae.engine.models.decoder import Decoder
from personae.engine.plan import MemoryLayout
from personae.engine.worker.capture import Capture, Cut
from personae.engine.worker.step_graphs import Graph, Step, StepGraphs
from personae.kernels.attention import AttentionBatch
from personae.kernels.attention_backend import AttentionPlan
from personae.kernels.side_stream import SideStream
from personae.lora.pool import LoraPool
from personae.lora.segments import LoraBatch

SIZES = (64, 128, 192, 256, 384, 512)  # tokens; for a longer prompt, the host is not what the step waits for


@dataclass(slots=True)
class Running:
    """The step that is running: how many tokens it has, and its attention by layer."""

    count: int
    plans: Mapping[int, AttentionPlan]


class PrefillGraphs(StepGraphs[int]):
    """See StepGraphs. A size is a number of tokens."""

    off = "CUDA graphs for prompts are off. Steps with a prompt are launched kernel by kernel"

    def __init__(
        self,
        model: Decoder,
        kv: KVCache,
        pool: LoraPool,
        layout: MemoryLayout,
        capture: Capture,
        side_stream: SideStream | None = None,
    ) -> None:
        self._sizes = sizes(layout.max_batch_tokens)
        self._segments = layout.max_seqs
        most = self._sizes[-1]
        super().__init__(model, kv, pool, capture, side_stream, most=most, segments=self._segments)
        # What attention reads and writes, by heads and their width.
        self._queries: dict[tuple[int, ...], Tensor] = {}
        self._mixed: dict[tuple[int, ...], Tensor] = {}
        self._running: Running | None = None  # None: a capture, in which attention is left out

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """See StepGraphs."""
        return *super().buffers, *self._queries.values(), *self._mixed.values()

    def _largest_first(self) -> Iterator[int]:
        return reversed(self._sizes)

    def _size_of(self, step: Step) -> int | None:
        return next((size for size in self._sizes if size >= len(step.tokens)), None)

    def _fill(self, step: Step, size: int) -> None:
        self._copies(step, size, self._segments_of(size)).launch()

    def _record(self, capture: Capture, size: int, adapters: bool) -> tuple[Callable[[], None], Tensor]:
        return capture.pieces(lambda cut: self._forward(size, adapters, cut))

    def _replay(self, graph: Graph, step: Step) -> None:
        self._running = Running(len(step.tokens), self._model.plan(self._kv, step.batch))
        try:
            graph.replay()
        finally:
            self._running = None

    def _without_graph(self, step: Step, size: int) -> Tensor:
        lora = None if step.work is None else LoraBatch(self._pool, step.work)
        return self._model.forward(step.tokens, step.positions, self._kv, step.batch, lora)

    def _segments_of(self, size: int) -> int:
        """The length of a work list for so many tokens: each row of a step has at most one segment."""
        return min(size, self._segments)

    def _forward(self, size: int, adapters: bool, cut: Cut) -> Tensor:
        """A step of `size` tokens from the buffers, cut at each layer's attention: what is captured."""
        empty = self._work.rows[:0]  # attention is cut out
        batch = AttentionBatch(empty, empty, empty, self._write_index[:size], max_query=size, max_kv=size)
        lora = self._lora(adapters, self._segments_of(size), self._side_stream)
        attend = {layer: self._attention(layer, cut) for layer in self._kv.layers}
        tokens, positions = self._tokens[:size], self._positions[:size]
        return self._model.forward(tokens, positions, self._kv, batch, lora, attend=attend)

    def _attention(self, layer: int, cut: Cut) -> AttentionPlan:
        """Attention of a layer, launched between two graphs by the plan of the step that is running."""

        def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
            queries, mixed = self._shared(self._queries, q), self._shared(self._mixed, q)
            queries[: len(q)].copy_(q)  # else each layer of each graph would keep its own

            def run() -> None:
                step = self._running
                if step is not None:
                    rows = queries[: step.count]
                    mixed[: step.count].copy_(step.plans[layer](rows, keys, values, scale, window))

            cut(run)
            return mixed[: len(q)]

        return attend

    def _shared(self, buffers: dict[tuple[int, ...], Tensor], q: Tensor) -> Tensor:
        """The buffer for tensors like q: one is enough, because layers use it one after the other."""
        heads = tuple(q.shape[1:])
        if heads not in buffers:
            buffers[heads] = torch.zeros(self._sizes[-1], *heads, dtype=q.dtype, device=q.device)
        return buffers[heads]


def sizes(most: int) -> tuple[int, ...]:
    """The numbers of tokens that graphs are captured for, in a layout with at most `most` in a step."""
    return tuple(sorted({min(size, most) for size in SIZES}))
