"""CUDA graphs for steps without prompts: the host makes one launch instead of hundreds.

A graph repeats the same kernels on the same addresses. So everything that a step tells the device is written
into buffers that stay in place. In a captured pass the host may decide only by the bucket (`buckets.py`) and
by whether the step has adapters. Everything else is in device memory: how many tokens each row has, which
adapters the tokens take, and their ranks (in `query_start`, the work list and the rank tables). So one graph
serves any mix of adapters.

An unused token of a bucket is padded as a sequence of one token, with id 0, on the cache's spare page. Where
rows have several tokens, empty rows may follow these.

A new graph is on trial. Its first steps also run kernel by kernel on the same buffers, and the results are
compared. If a capture fails, or a graph fails or disagrees, graphs are turned off in this process. The log
says so once, and steps are launched kernel by kernel.

In a graph the adapters' updates run on a side stream, in parallel with the base's products. Kernel by kernel,
they run one after the other.

A `Capture` records and repeats work: CUDA graphs on a GPU, and in tests a recorder that repeats the operators
on the same tensors.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
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

TRIALS = 2  # steps; the first finds a wrong capture, the second a value that was captured as a constant
TOLERANCE = 0.02  # relative to a row's largest value; the same kernels should agree exactly

_log = logging.getLogger("personae.engine")


Cut = Callable[[Callable[[], None]], None]
"""Ends a graph, runs what it is given, and begins the next graph."""


class Capture(Protocol):
    """Records work on a device, to repeat it later without Python."""

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Runs the work and records it. Returns what repeats it, and its result, which each repetition
        overwrites."""

    def pieces(self, work: Callable[[Cut], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """As a call, but the work is cut: what it gives to `cut` runs between two graphs, anew each time."""


class CudaCapture:
    """CUDA graphs in one memory pool: one graph runs at a time, so all share their scratch memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types here

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """See Capture. Runs the work once before the capture, so that kernels are compiled and libraries
        initialised."""
        return self._captured(lambda _cut: work(), work)

    def pieces(self, work: Callable[[Cut], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """See Capture. Runs the work once before, too."""
        return self._captured(work, lambda: work(lambda run: run()))

    def _captured(
        self, work: Callable[[Cut], Tensor], rehearse: Callable[[], Tensor]
    ) -> tuple[Callable[[], None], Tensor]:
        here, steps = torch.cuda.current_stream(), list[Callable[[], None]]()
        try:
            torch.cuda.synchronize()
            with torch.cuda.stream(self._stream):
                rehearse()
            with ExitStack() as capturing:
                steps.append(self._begin(capturing))

                def cut(run: Callable[[], None]) -> None:
                    capturing.close()
                    with torch.cuda.stream(self._stream):
                        run()
                    steps.extend((run, self._begin(capturing)))

                result = work(cut)
        finally:
            torch.cuda.set_stream(here)  # a failed capture leaves its own stream set
        return steps[0] if len(steps) == 1 else partial(_run_all, steps), result

    def _begin(self, capturing: ExitStack) -> Callable[[], None]:
        """Begin a graph, until the stack is closed; what replays it."""
        graph = torch.cuda.CUDAGraph()
        # In this mode, other threads can go on copying adapters meanwhile.
        capturing.enter_context(
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        )
        replay: Callable[[], None] = graph.replay
        return replay


def _run_all(steps: list[Callable[[], None]]) -> None:
    for step in steps:
        step()


@dataclass(slots=True)
class Graph:
    """A captured pass. Each replay writes `hidden` [tokens, H]. `trials`: how many trial steps are left."""

    replay: Callable[[], None]
    hidden: Tensor
    trials: int = TRIALS


class DecodeGraphs:
    """The graphs of one runner. `capture_all` captures each graph, or the first step of its bucket does.

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
        self._buckets = Buckets(layout)
        self._graphs: dict[tuple[Bucket, bool], Graph] = {}
        most, pages = self._buckets.most, -(-layout.max_model_len // layout.page_size)

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=model.device)

        self._tokens = ints(most, dtype=torch.int64)
        self._positions = ints(most, dtype=torch.int64)
        self._single_starts = torch.arange(most + 1, dtype=torch.int32, device=model.device)
        self._query_start = self._single_starts.clone()
        self._rows_are_single = True
        self._kv_length = ints(most)
        self._page_table = ints(most, pages)
        self._write_index = ints(most, dtype=torch.int64)
        self._work = WorkList(ints(most), ints(most), ints(most))

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """All tensors that change between two replays, except the KV cache and the adapters."""
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
        """Capture every bucket now. The largest comes first, so that the others reuse its scratch memory. The
        captured steps are only padding, so each graph stays on trial until its first real steps."""
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
        """The hidden rows [T, H] of a step, valid until the next step; None if no graph can run it.

        tokens, positions: [T] int64. work: the step's adapters; None if it has none.
        """
        count = len(tokens)
        bucket = None if self._capture is None else self._buckets.of(count, batch.max_query, batch.max_kv)
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
            "CUDA graphs are off. Decode steps are launched kernel by kernel, which is slower: %s: %s",
            type(error).__name__,
            error,
        )

    def _fill(
        self, tokens: Tensor, positions: Tensor, batch: AttentionBatch, work: WorkList | None, bucket: Bucket
    ) -> None:
        """Writes the step into the buffers, followed by padding."""
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
            self._fill_query_start(batch.query_start, len(tokens), end)
        elif not self._rows_are_single:
            self._query_start.copy_(self._single_starts)
            self._rows_are_single = True
        if work is not None:
            segments = len(work.rows)
            for buffer, values in (
                (self._work.first_row, work.first_row),
                (self._work.rows, work.rows),
                (self._work.adapter, work.adapter),
            ):
                buffer[:segments].copy_(values)
                buffer[segments:end].zero_()

    def _fill_query_start(self, query_start: Tensor, count: int, end: int) -> None:
        """Writes `query_start`: the rows of a step of `count` tokens, one row for each padding token up to
        `end`, then empty rows."""
        rows, unused = len(query_start), end - count
        self._query_start[:rows].copy_(query_start)
        self._query_start[rows : rows + unused].copy_(self._single_starts[count + 1 : end + 1])
        self._query_start[rows + unused : end + 1].fill_(end)
        self._rows_are_single = False

    def _forward(self, bucket: Bucket, adapters: bool, side_stream: SideStream | None = None) -> Tensor:
        """Runs a step of a bucket from the buffers. With a side stream: the work that is captured."""
        end = bucket.tokens
        batch = AttentionBatch(
            self._query_start[: end + 1],
            self._kv_length[:end],
            self._page_table[:end],
            self._write_index[:end],
            max_query=bucket.row_tokens,
            max_kv=bucket.max_kv,
        )
        lora = None
        if adapters:  # a new work list, so that its SGMV plans are made within the graph
            own = self._work
            work = WorkList(own.first_row[:end], own.rows[:end], own.adapter[:end])
            lora = LoraBatch(self._pool, work, side_stream=side_stream)
        return self._model.forward(self._tokens[:end], self._positions[:end], self._kv, batch, lora)


def check(found: Tensor, truth: Tensor) -> None:
    """Raises ArithmeticError if a row differs from the truth. Waits for the device.

    An adapter may produce values that are not finite; then they must be at the same places in both.
    """
    found, truth = (torch.nan_to_num(rows.float(), nan=1e30) for rows in (found, truth))
    error = float(((found - truth).abs().amax(1) / truth.abs().amax(1).clamp_min(1e-30)).max())
    if not error <= TOLERANCE:
        raise ArithmeticError(
            f"a graph's result differs from the same kernels without a graph by {error:.2g}"
        )
