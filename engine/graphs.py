"""Decode steps as captured graphs: the host launches one thing instead of hundreds.

A graph repeats the same kernels on the same addresses. So everything that a step says to the device is
written into buffers that stay where they are, and what the host may decide in a captured pass depends on
nothing but its bucket: how many rows there are, rounded up, and whether there are adapters at all. Which
adapters, of which ranks, on which rows is in device memory (the work list and the rank tables), so one graph
serves any mix.

Rows of a bucket that nobody uses are sequences of one token on the cache's spare page, with token 0.

How work is captured and repeated is a `Capture`: CUDA graphs on a GPU, in the tests a recorder that repeats
the operators on the tensors that they had.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from personae.engine.kv import KVCache
from personae.engine.models.decoder import Decoder
from personae.engine.plan import MemoryLayout
from personae.kernels.attention import AttentionBatch
from personae.kernels.sgmv import WorkList
from personae.lora.pool import LoraPool
from personae.lora.segments import LoraBatch

Outputs = tuple[Tensor, Tensor]
"""hidden [T, H] and logits [T, V] float32 of a decode step, a row each."""


class Capture(Protocol):
    """Records work on a device, to be repeated without Python."""

    def __call__(self, work: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Runs the work and records it: (what repeats it, its results, which each repetition writes anew)."""


class CudaCapture:
    """CUDA graphs, all in one memory pool: one runs at a time, so they share their scratch memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]  # torch has no types here

    def __call__(self, work: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """See Capture. Runs the work once before, so that kernels are compiled and libraries initialised."""
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads, which copy adapters, may go on meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = work()
        return graph.replay, outputs


def buckets(most: int) -> tuple[int, ...]:
    """The numbers of rows that graphs are captured for: less than half more than a step has."""
    steps = [1, 2, 3, 4, 6, 8, 12]
    while steps[-1] < most:
        steps.append(steps[-2] * 2)
    return (*(count for count in steps if count < most), most)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step of R rows with one token each, all of which sample, as the runner packs it."""

    tokens: Tensor
    positions: Tensor
    attention: AttentionBatch
    work: WorkList | None


class DecodeGraphs:
    """The captured decode steps of one runner; each is captured when a step of its bucket first comes.

    kv: with a spare page. Results of a step are valid until the next one.
    """

    def __init__(
        self, model: Decoder, kv: KVCache, pool: LoraPool, layout: MemoryLayout, capture: Capture
    ) -> None:
        assert kv.spare_page is not None, "unused rows need a page of their own"
        self._model, self._kv, self._pool, self._capture = model, kv, pool, capture
        self._layout = layout
        self._buckets = buckets(layout.max_seqs)
        self._captured: dict[tuple[int, bool], tuple[Callable[[], None], Outputs]] = {}
        rows, pages = layout.max_seqs, -(-layout.max_model_len // layout.page_size)

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=model.device)

        self._tokens = ints(rows, dtype=torch.int64)
        self._positions = ints(rows, dtype=torch.int64)
        self._query_start = torch.arange(rows + 1, dtype=torch.int32, device=model.device)
        self._kv_length = ints(rows)
        self._page_table = ints(rows, pages)
        self._write_index = ints(rows, dtype=torch.int64)
        self._work = ints(3, rows)

    def run(self, step: DecodeStep) -> Outputs:
        """The hidden rows and logits of a step, by a graph."""
        count = len(step.tokens)
        bucket = next(size for size in self._buckets if size >= count)
        self._fill(step, count, bucket)
        key = bucket, step.work is not None
        found = self._captured.get(key)
        if found is None:
            found = self._captured[key] = self._capture(lambda: self._forward(*key))
        replay, (hidden, logits) = found
        replay()
        return hidden[:count], logits[:count]

    def _fill(self, step: DecodeStep, count: int, bucket: int) -> None:
        """Writes the step into the buffers, and unused rows behind it."""
        batch, spare = step.attention, cast(int, self._kv.spare_page)
        table = self._page_table[:bucket, : batch.page_table.shape[1]]
        for buffer, values, unused in (
            (self._tokens, step.tokens, 0),
            (self._positions, step.positions, 0),
            (self._kv_length, batch.kv_length, 1),
            (self._write_index, batch.write_index, spare * self._kv.page_size),
        ):
            buffer[:count].copy_(values)
            buffer[count:bucket].fill_(unused)
        table[:count].copy_(batch.page_table)
        self._page_table[count:bucket, :1].fill_(spare)
        if step.work is not None:
            segments = len(step.work.rows)
            for buffer, values in zip(
                self._work, (step.work.first_row, step.work.rows, step.work.adapter), strict=True
            ):
                buffer[:segments].copy_(values)
                buffer[segments:bucket].zero_()

    def _forward(self, bucket: int, adapters: bool) -> Outputs:
        """What is captured: a step of `bucket` rows as it lies in the buffers."""
        batch = AttentionBatch(
            self._query_start[: bucket + 1],
            self._kv_length[:bucket],
            self._page_table[:bucket],
            self._write_index[:bucket],
            max_query=1,
            max_kv=self._layout.max_model_len,
        )
        lora = None
        if adapters:  # a list of its own, so that its plans are made within the graph
            first_row, rows, adapter = (column[:bucket] for column in self._work)
            lora = LoraBatch(self._pool, WorkList(first_row, rows, adapter))
        tokens, positions = self._tokens[:bucket], self._positions[:bucket]
        hidden = self._model.forward(tokens, positions, self._kv, batch, lora)
        return hidden, self._model.logits(hidden)
