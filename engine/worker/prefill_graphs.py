"""Steps with prompts of up to 512 tokens as graphs that are cut at attention.

A layer's products, norms and adapters depend only on the number of tokens, as in a decode step. Attention
depends on how long each row and its context are, and chooses tiles and splits by that. So what lies between
two layers' attention is one graph, and attention is launched between the graphs, on the step's own rows. A
layer costs the host one replay and attention.

There are graphs for a few numbers of tokens, with adapters and without. The work list of adapters is in
device memory, so any mix of them replays the same graphs. Padding tokens write to the KV cache's spare page
and nothing reads what they compute.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from personae.engine.kv import KVCache
from personae.engine.models.decoder import Decoder
from personae.engine.plan import MemoryLayout
from personae.engine.worker.graphs import Capture, Cut, Graph, check
from personae.kernels.attention import AttentionBatch, AttentionPlan
from personae.kernels.sgmv import WorkList
from personae.kernels.side_stream import SideStream
from personae.lora.pool import LoraPool
from personae.lora.segments import LoraBatch

SIZES = (64, 128, 192, 256, 384, 512)  # tokens; for a longer prompt, the host is not what the step waits for

_log = logging.getLogger("personae.engine")


@dataclass(slots=True)
class Running:
    """The step that is running: how many tokens it has, and its attention by layer."""

    count: int
    plans: Mapping[int, AttentionPlan]


class PrefillGraphs:
    """The graphs of one runner. `capture_all` captures each graph, or the first step of its size does.

    kv: with a spare page. side_stream: runs the adapters' updates within a graph.
    """

    def __init__(
        self,
        model: Decoder,
        kv: KVCache,
        pool: LoraPool,
        layout: MemoryLayout,
        capture: Capture,
        side_stream: SideStream | None = None,
    ) -> None:
        assert kv.spare_page is not None, "padding rows need a spare page"
        self._model, self._kv, self._pool = model, kv, pool
        self._side_stream = side_stream
        self._capture: Capture | None = capture  # None: graphs are off
        self._sizes = sizes(layout.max_batch_tokens)
        self._graphs: dict[tuple[int, bool], Graph] = {}
        # What attention reads and writes, by heads and their width.
        self._queries: dict[tuple[int, ...], Tensor] = {}
        self._mixed: dict[tuple[int, ...], Tensor] = {}
        self._running: Running | None = None  # None: a capture, in which attention is left out
        self._segments = layout.max_seqs

        def ints(length: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(length, dtype=dtype, device=model.device)

        most = self._sizes[-1]
        self._tokens = ints(most, torch.int64)
        self._positions = ints(most, torch.int64)
        self._write_index = ints(most, torch.int64)
        self._work = WorkList(ints(self._segments), ints(self._segments), ints(self._segments))

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """All tensors that change between two replays, except the KV cache and the adapters."""
        work = self._work
        own = self._tokens, self._positions, self._write_index, work.first_row, work.rows, work.adapter
        return *own, *self._queries.values(), *self._mixed.values()

    def capture_all(self) -> None:
        """Capture graphs of every size now, the largest first, so that the others reuse its scratch memory.
        Each stays on trial until its first real steps."""
        self._write_index.fill_(cast(int, self._kv.spare_page) * self._kv.page_size)
        for size in reversed(self._sizes):
            for adapters in (False, True):
                if self._capture is None:
                    return
                try:
                    self._captured(size, adapters)
                except Exception as error:
                    self._give_up(error)

    def run(
        self, tokens: Tensor, positions: Tensor, batch: AttentionBatch, work: WorkList | None
    ) -> Tensor | None:
        """The hidden rows [T, H] of a step, valid until the next step; None if the step has too many tokens,
        or graphs are off.

        tokens, positions: [T] int64. work: the step's adapters; None if it has none.
        """
        count = len(tokens)
        size = next((size for size in self._sizes if size >= count), None)
        if self._capture is None or size is None:
            return None
        try:
            self._fill(tokens, positions, batch, work, size)
            graph = self._captured(size, work is not None)
            self._running = Running(count, self._model.plan(self._kv, batch))
            graph.replay()
            if graph.trials:
                graph.trials -= 1
                lora = None if work is None else LoraBatch(self._pool, work)
                check(graph.hidden[:count], self._model.forward(tokens, positions, self._kv, batch, lora))
            return graph.hidden[:count]
        except Exception as error:
            self._give_up(error)
            return None
        finally:
            self._running = None

    def _captured(self, size: int, adapters: bool) -> Graph:
        assert self._capture is not None
        graph = self._graphs.get((size, adapters))
        if graph is None:
            graph = Graph(*self._capture.pieces(lambda cut: self._forward(size, adapters, cut)))
            self._graphs[size, adapters] = graph
        return graph

    def _give_up(self, error: Exception) -> None:
        self._capture = None
        self._graphs.clear()
        _log.warning(
            "CUDA graphs for prompts are off. Steps with a prompt are launched kernel by kernel: %s: %s",
            type(error).__name__,
            error,
        )

    def _fill(
        self, tokens: Tensor, positions: Tensor, batch: AttentionBatch, work: WorkList | None, size: int
    ) -> None:
        """Writes the step into the buffers, followed by padding."""
        padded: list[tuple[Tensor, Tensor, int, int]] = [
            (self._tokens, tokens, 0, size),
            (self._positions, positions, 0, size),
            (self._write_index, batch.write_index, cast(int, self._kv.spare_page) * self._kv.page_size, size),
        ]
        if work is not None:
            own = self._work
            lists = (own.first_row, work.first_row), (own.rows, work.rows), (own.adapter, work.adapter)
            padded += [(buffer, values, 0, self._segments_of(size)) for buffer, values in lists]
        for buffer, values, unused, end in padded:
            buffer[: len(values)].copy_(values)
            buffer[len(values) : end].fill_(unused)

    def _segments_of(self, size: int) -> int:
        """The length of a work list for so many tokens: each row of a step has at most one segment."""
        return min(size, self._segments)

    def _forward(self, size: int, adapters: bool, cut: Cut) -> Tensor:
        """A step of `size` tokens from the buffers, cut at each layer's attention: what is captured."""
        write_index, segments = self._write_index[:size], self._segments_of(size)
        empty = self._work.rows[:0]  # attention is cut out
        batch = AttentionBatch(empty, empty, empty, write_index, max_query=size, max_kv=size)
        lora = None
        if adapters:  # a new work list, so that its SGMV plans are made within the graphs
            own = self._work
            work = WorkList(own.first_row[:segments], own.rows[:segments], own.adapter[:segments])
            lora = LoraBatch(self._pool, work, side_stream=self._side_stream)
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
