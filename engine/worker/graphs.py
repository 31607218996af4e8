"""Steps without prompts as captured graphs: the host launches one thing instead of hundreds.

A graph repeats the same kernels on the same addresses. So everything that a step says to the device is
written into buffers that stay where they are, and what the host may decide in a captured pass depends on
nothing but its bucket (`buckets.py`) and whether there are adapters at all. Which row has how many tokens,
and which adapters, of which ranks, are on which tokens is in device memory (where rows begin, the work list,
the rank tables), so one graph serves any mix.

Tokens of a bucket that nobody uses are sequences of one token on the cache's spare page, with token 0; where
rows have several tokens there may also be rows without any, behind them.

A graph is on trial when it is new: its first steps are also run kernel by kernel, on the same buffers, and
compared. One that cannot be captured, fails or disagrees is the end of graphs in this process, which says so
once and goes on without.

In a graph the adapters' updates begin on a branch, beside the base's products; kernel by kernel one follows
the other.

How work is captured and repeated is a `Capture`: CUDA graphs on a GPU, in the tests a recorder that repeats
the operators on the tensors that they had.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from personae.engine.kv import KVCache
from personae.engine.models.decoder import Decoder
from personae.engine.plan import MemoryLayout
from personae.engine.worker.buckets import Bucket, Buckets
from personae.kernels.attention import AttentionBatch
from personae.kernels.sgmv import WorkList
from personae.kernels.side_stream import SideStream
from personae.lora.pool import LoraPool
from personae.lora.segments import LoraBatch

TRIALS = 2  # steps: one shows what was captured wrong, the next what was captured and should not have been
TOLERANCE = 0.02  # of a row's largest value; the same kernels on the same numbers should differ by nothing

_log = logging.getLogger("personae.engine")


class Capture(Protocol):
    """Records work on a device, to be repeated without Python."""

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Runs the work and records it: (what repeats it, its result, which each repetition writes anew)."""


class CudaCapture:
    """CUDA graphs, all in one memory pool: one runs at a time, so they share their scratch memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types here

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """See Capture. Runs the work once before, so that kernels are compiled and libraries initialised."""
        here = torch.cuda.current_stream()
        try:
            torch.cuda.synchronize()
            with torch.cuda.stream(self._stream):
                work()
            graph = torch.cuda.CUDAGraph()
            # Other threads, which copy adapters, may go on meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                result = work()
        finally:
            torch.cuda.set_stream(here)  # a capture that fails leaves its own behind
        return graph.replay, result


@dataclass(slots=True)
class Graph:
    """A captured pass. `hidden` [tokens, H] is written by each replay; `trials`: how many are left."""

    replay: Callable[[], None]
    hidden: Tensor
    trials: int = TRIALS


class DecodeGraphs:
    """The captured steps of one runner; each is captured by `capture_all`, or when a step of its
    bucket first comes.

    kv: with a spare page. branch: for what of a graph runs beside the rest.
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
        assert kv.spare_page is not None, "unused rows need a page of their own"
        self._model, self._kv, self._pool, self._layout = model, kv, pool, layout
        self._side_stream = side_stream
        self._capture: Capture | None = capture  # None: given up
        self._buckets = Buckets(layout)
        self._graphs: dict[tuple[Bucket, bool], Graph] = {}
        most, pages = self._buckets.most, -(-layout.max_model_len // layout.page_size)

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=model.device)

        self._tokens = ints(most, dtype=torch.int64)
        self._positions = ints(most, dtype=torch.int64)
        self._one_each = torch.arange(most + 1, dtype=torch.int32, device=model.device)
        self._query_start = self._one_each.clone()
        self._has_one_each = True
        self._kv_length = ints(most)
        self._page_table = ints(most, pages)
        self._write_index = ints(most, dtype=torch.int64)
        self._work = WorkList(ints(most), ints(most), ints(most))

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Everything that changes between two replays, beside the cache and the adapters."""
        return (
            self._tokens,
            self._positions,
            self._query_start,
            self._kv_length,
            self._page_table,
            self._write_index,
            self._work.first_row,
            self._work.rows,
            self._work.adapter,
        )

    def capture_all(self) -> None:
        """Capture every bucket now, the largest first: the others find their scratch memory in its. Steps of
        nothing are captured, so each graph is on trial until real ones have come."""
        spare = cast(int, self._kv.spare_page)
        self._page_table[:, :1].fill_(spare)
        self._kv_length.fill_(1)
        self._write_index.fill_(spare * self._kv.page_size)
        for bucket in sorted(self._buckets, reverse=True):
            for adapters in (False, True):
                if self._capture is None:
                    return
                try:
                    self._captured(bucket, adapters)
                except Exception as error:
                    self._give_up(error)

    def _captured(self, bucket: Bucket, adapters: bool) -> Graph:
        assert self._capture is not None
        graph = self._graphs.get((bucket, adapters))
        if graph is None:
            graph = Graph(*self._capture(lambda: self._forward(bucket, adapters, self._side_stream)))
            self._graphs[bucket, adapters] = graph
        return graph

    def run(
        self, tokens: Tensor, positions: Tensor, batch: AttentionBatch, work: WorkList | None
    ) -> Tensor | None:
        """The hidden rows [T, H] of a step, until the next step; None if it has to be run without a graph.

        tokens, positions: [T] int64. `work` is all that the adapters do to it.
        """
        count = len(tokens)
        bucket = None if self._capture is None else self._buckets.of(count, batch.max_query)
        if bucket is None:
            return None
        key = bucket, work is not None
        try:
            self._fill(tokens, positions, batch, work, bucket)
            graph = self._captured(*key)
            graph.replay()
            if graph.trials:
                graph.trials -= 1
                check(graph.hidden[:count], self._forward(*key)[:count])
            return graph.hidden[:count]
        except Exception as error:
            self._give_up(error)
            return None

    def _give_up(self, error: Exception) -> None:
        self._capture = None
        self._graphs.clear()
        _log.warning(
            "CUDA graphs are off, decode steps are launched kernel by kernel, which is slower: %s: %s",
            type(error).__name__,
            error,
        )

    def _fill(
        self, tokens: Tensor, positions: Tensor, batch: AttentionBatch, work: WorkList | None, bucket: Bucket
    ) -> None:
        """Writes the step into the buffers, and unused tokens and rows behind it."""
        spare, end = cast(int, self._kv.spare_page), bucket.tokens
        for buffer, values, unused in (
            (self._tokens, tokens, 0),
            (self._positions, positions, 0),
            (self._kv_length, batch.kv_length, 1),
            (self._write_index, batch.write_index, spare * self._kv.page_size),
        ):
            buffer[: len(values)].copy_(values)
            buffer[len(values) : end].fill_(unused)
        rows = len(batch.kv_length)
        self._page_table[:rows, : batch.page_table.shape[1]].copy_(batch.page_table)
        self._page_table[rows:end, :1].fill_(spare)
        if bucket.row_tokens > 1:
            self._begin_rows(batch.query_start, len(tokens), end)
        elif not self._has_one_each:
            self._query_start.copy_(self._one_each)
            self._has_one_each = True
        if work is not None:
            segments = len(work.rows)
            for buffer, values in (
                (self._work.first_row, work.first_row),
                (self._work.rows, work.rows),
                (self._work.adapter, work.adapter),
            ):
                buffer[:segments].copy_(values)
                buffer[segments:end].zero_()

    def _begin_rows(self, query_start: Tensor, count: int, end: int) -> None:
        """Writes where rows begin: those of a step of `count` tokens, one for each unused token up to `end`,
        and rows of none."""
        rows, unused = len(query_start), end - count
        self._query_start[:rows].copy_(query_start)
        self._query_start[rows : rows + unused].copy_(self._one_each[count + 1 : end + 1])
        self._query_start[rows + unused : end + 1].fill_(end)
        self._has_one_each = False

    def _forward(self, bucket: Bucket, adapters: bool, side_stream: SideStream | None = None) -> Tensor:
        """A step of a bucket as it lies in the buffers; with the branch, what is captured."""
        end = bucket.tokens
        batch = AttentionBatch(
            self._query_start[: end + 1],
            self._kv_length[:end],
            self._page_table[:end],
            self._write_index[:end],
            max_query=bucket.row_tokens,
            max_kv=self._layout.max_model_len,
        )
        lora = None
        if adapters:  # a list of its own, so that its plans are made within the graph
            own = self._work
            work = WorkList(own.first_row[:end], own.rows[:end], own.adapter[:end])
            lora = LoraBatch(self._pool, work, side_stream=side_stream)
        return self._model.forward(self._tokens[:end], self._positions[:end], self._kv, batch, lora)


def check(found: Tensor, truth: Tensor) -> None:
    """Raises ArithmeticError where a row differs from what it should be. Waits for the device.

    A row that is not finite (an adapter may do that) has to be so in both.
    """
    found, truth = (torch.nan_to_num(rows.float(), nan=1e30) for rows in (found, truth))
    error = float(((found - truth).abs().amax(1) / truth.abs().amax(1).clamp_min(1e-30)).max())
    if not error <= TOLERANCE:
        raise ArithmeticError(f"a graph's rows differ from those of its kernels by {error:.2g}")
