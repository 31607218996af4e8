"""What graphs of decode steps and graphs of steps with prompts have in common.

A graph repeats the same kernels on the same addresses. So everything that a step tells the device is written
into buffers that stay in place, in one launch for all of them.

A new graph is on trial. Its first steps also run kernel by kernel, and the results are compared. If a capture
fails, or a graph fails or disagrees, graphs are turned off in this process. The log says so once, and steps
are launched kernel by kernel.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from personae.engine.kv import KVCache
from personae.engine.models.decoder import Decoder
from personae.engine.worker.capture import Capture
from personae.kernels.attention import AttentionBatch
from personae.kernels.sgmv import WorkList
from personae.kernels.side_stream import SideStream
from personae.lora.pool import LoraPool
from personae.lora.segments import LoraBatch

TRIALS = 2  # steps; the first finds a wrong capture, the second a value that was captured as a constant
TOLERANCE = 0.02  # relative to a row's largest value; the same kernels should agree exactly

_log = logging.getLogger("personae.engine")

Size = TypeVar("Size", bound=Hashable)


@dataclass(slots=True)
class Graph:
    """A captured pass. Each replay writes `hidden` [tokens, H]. `trials`: how many trial steps are left."""

    replay: Callable[[], None]
    hidden: Tensor
    trials: int = TRIALS


class Step(NamedTuple):
    """A packed step. tokens, positions: [T] int64. work: its adapters; None if it has none."""

    tokens: Tensor
    positions: Tensor
    batch: AttentionBatch
    work: WorkList | None


class StepGraphs(ABC, Generic[Size]):
    """The graphs of one runner, by size, with adapters and without. `capture_all` captures each graph, or the
    first step of its size does.

    kv: with a spare page. side_stream: runs the adapters' updates within a graph. most: tokens of the largest
    graph. segments: of the longest work list.
    """

    off: str
    """The warning when graphs are turned off."""

    def __init__(
        self,
        model: Decoder,
        kv: KVCache,
        pool: LoraPool,
        capture: Capture,
        side_stream: SideStream | None,
        *,
        most: int,
        segments: int,
    ) -> None:
        assert kv.spare_page is not None, "padding tokens need a spare page"
        self._model, self._kv, self._pool = model, kv, pool
        self._side_stream = side_stream
        self._capture: Capture | None = capture  # None: graphs are off
        self._graphs: dict[tuple[Size, bool], Graph] = {}
        self._tokens, self._positions, self._write_index = (
            self._filled(0, most, dtype=torch.int64) for _ in range(3)
        )
        first_row, rows, adapter = (self._filled(0, segments) for _ in range(3))
        self._work = WorkList(first_row, rows, adapter)
        # What padding has, for as many tokens as there may be.
        self._zeros, self._ones = self._filled(0, 2 * max(most, segments)), self._filled(1, most)
        self._spare = self._filled(kv.spare_page * kv.page_size, most, dtype=torch.int64)

    def _filled(self, value: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=self._model.device)

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """All tensors that change between two replays, except the KV cache and the adapters."""
        work = self._work
        own = self._tokens, self._positions, self._write_index
        return *own, work.first_row, work.rows, work.adapter

    def capture_all(self) -> None:
        """Capture graphs of every size now. The largest comes first, so that the others reuse its scratch
        memory. The captured steps are only padding, so each graph stays on trial until its first real
        steps."""
        self._write_index.copy_(self._spare)
        for size in self._largest_first():
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
        """The hidden rows [T, H] of a step, valid until the next step; None if no graph can run it.

        tokens, positions: [T] int64. work: the step's adapters; None if it has none.
        """
        step, count = Step(tokens, positions, batch, work), len(tokens)
        size = None if self._capture is None else self._size_of(step)
        if size is None:
            return None
        try:
            self._fill(step, size)
            graph = self._captured(size, work is not None)
            self._replay(graph, step)
            if graph.trials:
                graph.trials -= 1
                check(graph.hidden[:count], self._without_graph(step, size)[:count])
            return graph.hidden[:count]
        except Exception as error:
            self._give_up(error)
            return None

    def _captured(self, size: Size, adapters: bool) -> Graph:
        assert self._capture is not None
        graph = self._graphs.get((size, adapters))
        if graph is None:
            graph = Graph(*self._record(self._capture, size, adapters))
            self._graphs[size, adapters] = graph
        return graph

    def _give_up(self, error: Exception) -> None:
        self._capture = None
        self._graphs.clear()
        _log.warning("%s: %s: %s", self.off, type(error).__name__, error)

    @abstractmethod
    def _largest_first(self) -> Iterator[Size]:
        """All sizes."""

    @abstractmethod
    def _size_of(self, step: Step) -> Size | None:
        """The size of the graph that runs the step; None if there is none."""

    @abstractmethod
    def _fill(self, step: Step, size: Size) -> None:
        """Write the step into the buffers, followed by padding."""

    @abstractmethod
    def _record(self, capture: Capture, size: Size, adapters: bool) -> tuple[Callable[[], None], Tensor]:
        """Capture a step of this size from the buffers."""

    @abstractmethod
    def _without_graph(self, step: Step, size: Size) -> Tensor:
        """The hidden rows of the step that was just replayed, kernel by kernel."""

    def _replay(self, graph: Graph, step: Step) -> None:
        graph.replay()

    def _copies(self, step: Step, end: int, segments: int) -> "Copies":
        """What every graph reads: the tokens, padded up to `end`, and the work list, up to `segments`."""
        copies = Copies()
        for buffer, values, unused in (
            (self._tokens, step.tokens, self._zeros),
            (self._positions, step.positions, self._zeros),
            (self._write_index, step.batch.write_index, self._spare),
        ):
            copies.padded(buffer, values, unused, end)
        if step.work is not None:
            own, work = self._work, step.work
            copies.padded(own.first_row, work.first_row, self._zeros, segments)
            copies.padded(own.rows, work.rows, self._zeros, segments)
            copies.padded(own.adapter, work.adapter, self._zeros, segments)
        return copies

    def _lora(self, adapters: bool, segments: int, side_stream: SideStream | None) -> LoraBatch | None:
        """The adapters of the buffers. The work list is new, so that its SGMV plans are made in the graph."""
        if not adapters:
            return None
        own = self._work
        work = WorkList(own.first_row[:segments], own.rows[:segments], own.adapter[:segments])
        return LoraBatch(self._pool, work, side_stream=side_stream)

    @property
    def _spare_page(self) -> int:
        return cast(int, self._kv.spare_page)


class Copies:
    """Copies within a device, collected and then made by one launch.

    That needs sources and targets of one dtype and of the same strides; see
    `foreach_tensor_copy_list_kernel_cuda_` in torch. So all are copied as 32-bit words.
    """

    def __init__(self) -> None:
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []

    def add(self, target: Tensor, source: Tensor) -> None:
        """Both contiguous and of one shape, int32 or int64."""
        if len(target):
            self._targets.append(target.view(torch.int32))
            self._sources.append(source.view(torch.int32))

    def padded(self, buffer: Tensor, values: Tensor, unused: Tensor, end: int) -> None:
        """The values into the buffer, followed by elements of `unused` up to `end`."""
        self.add(buffer[: len(values)], values)
        rest = buffer[len(values) : end]
        self.add(rest, unused.view(buffer.dtype)[: len(rest)])

    def launch(self) -> None:
        """Make them."""
        torch._foreach_copy_(self._targets, self._sources)


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
