"""CUDA graphs for steps without prompts: the host makes one launch instead of hundreds.

In a captured pass the host may decide only by the bucket (`buckets.py`) and by whether the step has adapters.
Everything else is in device memory: how many tokens each row has, which adapters the tokens take, and their
ranks (in `query_start`, the work list and the rank tables). So one graph serves any mix of adapters.

An unused token of a bucket is padded as a sequence of one token, with id 0, on the cache's spare page. Where
rows have several tokens, empty rows may follow these.

In a graph the adapters' updates run on a side stream, in parallel with the base's products. Kernel by kernel,
they run one after the other.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from personae.engine.kv import KVCache
from personae.engine.models.decoder import Decoder
from personae.engine.plan import MemoryLayout
from personae.engine.worker.buckets import Bucket, Buckets
from personae.engine.worker.capture import Capture
from personae.engine.worker.step_graphs import Copies, Step, StepGraphs
from personae.kernels.attention import AttentionBatch
from personae.kernels.side_stream import SideStream
from personae.lora.pool import LoraPool


class DecodeGraphs(StepGraphs[Bucket]):
    """See StepGraphs."""

    off = "CUDA graphs are off. Decode steps are launched kernel by kernel, which is slower"

    def __init__(
        self,
        model: Decoder,
        kv: KVCache,
        pool: LoraPool,
        layout: MemoryLayout,
        capture: Capture,
        side_stream: SideStream | None = None,
    ) -> None:
        self._buckets = Buckets(layout)
        most, pages = self._buckets.most, -(-layout.max_model_len // layout.page_size)
        super().__init__(model, kv, pool, capture, side_stream, most=most, segments=most)
        self._single_starts = torch.arange(most + 1, dtype=torch.int32, device=model.device)
        self._query_start = self._single_starts.clone()
        self._rows_are_single = True
        self._ends: dict[int, Tensor] = {}
        self._kv_length = self._filled(1, most)
        self._page_table = self._filled(0, most, pages)
        self._page_table[:, 0] = self._spare_page
        self._rows = 0  # of the page table; behind them each row has the spare page

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """See StepGraphs."""
        return *super().buffers, self._query_start, self._kv_length, self._page_table

    def _largest_first(self) -> Iterator[Bucket]:
        return iter(sorted(self._buckets, reverse=True))

    def _size_of(self, step: Step) -> Bucket | None:
        return self._buckets.of(len(step.tokens), step.batch.max_query, step.batch.max_kv)

    def _record(self, capture: Capture, size: Bucket, adapters: bool) -> tuple[Callable[[], None], Tensor]:
        return capture(lambda: self._forward(size, adapters, self._side_stream))

    def _without_graph(self, step: Step, size: Bucket) -> Tensor:
        return self._forward(size, step.work is not None)

    def _fill(self, step: Step, size: Bucket) -> None:
        batch, end = step.batch, size.tokens
        copies = self._copies(step, end, end)
        copies.padded(self._kv_length, batch.kv_length, self._ones, end)
        if size.row_tokens > 1:
            self._fill_query_start(copies, batch.query_start, len(step.tokens), end)
        elif not self._rows_are_single:
            copies.add(self._query_start, self._single_starts)
            self._rows_are_single = True
        copies.launch()
        rows, pages = batch.page_table.shape
        self._page_table[:rows, :pages].copy_(batch.page_table)
        if rows < self._rows:
            self._page_table[rows : self._rows, 0].fill_(self._spare_page)
        self._rows = rows

    def _fill_query_start(self, copies: Copies, query_start: Tensor, count: int, end: int) -> None:
        """Writes `query_start`: the rows of a step of `count` tokens, one row for each padding token up to
        `end`, then empty rows."""
        rows, unused = len(query_start), end - count
        if end not in self._ends:
            self._ends[end] = torch.full_like(self._query_start, end)
        copies.add(self._query_start[:rows], query_start)
        copies.add(self._query_start[rows : rows + unused], self._single_starts[count + 1 : end + 1])
        copies.add(self._query_start[rows + unused : end + 1], self._ends[end][rows + unused : end + 1])
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
        lora = self._lora(adapters, end, side_stream)
        return self._model.forward(self._tokens[:end], self._positions[:end], self._kv, batch, lora)
