"""From the rows of a step to the adapters' updates in a model's layers."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from personae.kernels.decoder import LoraStep
from personae.kernels.sgmv import WorkList
from personae.kernels.sgmv_calls import Finish
from personae.kernels.side_stream import SideStream
from personae.kernels.upload import upload, uploads
from personae.lora.context import RoutedLora
from personae.lora.copies import CopyEvent
from personae.lora.non_lora_deltas import StepDeltas
from personae.lora.pool import LoraPool


def segments_of(slots: Sequence[int | None], counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first row, rows, slot) of the segments of a step. Row i has counts[i] >= 1 packed tokens and takes the
    adapter slots[i]; None is the base model.

    Neighbours with the same adapter become one segment, so rows sorted by adapter give the shortest list.
    """
    segments: list[tuple[int, int, int]] = []
    start, last = 0, None
    for slot, count in zip(slots, counts, strict=True):
        if slot is not None and slot == last:
            first, rows, _ = segments[-1]
            segments[-1] = (first, rows + count, slot)
        elif slot is not None:
            segments.append((start, count, slot))
        start, last = start + count, slot
    return segments


def work_list(slots: Sequence[int | None], counts: Sequence[int], device: torch.device) -> WorkList:
    """The work list of `segments_of(slots, counts)`, with one copy to the device."""
    return _on_device(segments_of(slots, counts), device)


def _on_device(segments: Sequence[tuple[int, int, int]], device: torch.device) -> WorkList:
    columns = np.array(segments, np.int32).reshape(-1, 3).T
    first_row, rows, adapter = uploads(tuple(columns), device)
    return WorkList(first_row, rows, adapter)


def lora_batch(pool: LoraPool, slots: Sequence[int | None], counts: Sequence[int]) -> "LoraBatch | None":
    """The LoraContext of a step, with rows as for `segments_of`; None if the step has no adapter."""
    segments = segments_of(slots, counts)
    if not segments:
        return None
    used = {slot for _, _, slot in segments}
    slots_of = None
    if pool.has_experts(used):
        column = np.full(sum(counts), -1, np.int64)
        for first, rows, slot in segments:
            column[first : first + rows] = slot
        slots_of = upload(column, pool.device)
    work, deltas = _on_device(segments, pool.device), pool.deltas.of_step(segments)
    return LoraBatch(pool, work, deltas, pool.arriving(used), token_slots=slots_of)


def _unchanged(ys: tuple[Tensor, ...]) -> None:
    """The updates of modules that adapters cannot change: none."""


class LoraBatch:
    """The LoraContext of one step: applies the pool's adapters to the rows of a work list.

    arriving: the layers' copy events of each adapter that may still be arriving. side_stream: where updates
    begin, in parallel with the base's products. token_slots: [T] int64, the slot of each token, -1 for none;
    None if no adapter changes experts.
    """

    def __init__(
        self,
        pool: LoraPool,
        work: WorkList,
        deltas: StepDeltas | None = None,
        arriving: Sequence[Sequence[CopyEvent]] = (),
        side_stream: SideStream | None = None,
        token_slots: Tensor | None = None,
    ) -> None:
        assert side_stream is None or not arriving, (
            "a side stream would read adapters before their copies are done"
        )
        self._pool = pool
        self._work = work
        self._deltas = deltas
        self._arriving = arriving
        self._side_stream = side_stream
        self._token_slots = token_slots

    def begin(self, layer: int, group: str, x: Tensor) -> Finish:
        """See LoraContext."""
        return self._begin(layer, group, x, self._work)

    def _begin(self, layer: int, group: str, x: Tensor, work: WorkList) -> Finish:
        if group not in self._pool.tables:
            return _unchanged
        weight_pools, tables = self._pool.weight_pools[group][layer], self._pool.tables[group]
        add = self._pool.begin_sgmv(x, weight_pools, tables, work, self._side_stream)

        def finish(ys: tuple[Tensor, ...]) -> None:
            for marks in self._arriving:
                marks[layer].wait()
            if self._deltas is not None and work is self._work:
                self._deltas.apply(layer, group, ys)
            add(ys)

        return finish

    def routed(self, tokens: Tensor, experts: Tensor) -> "RoutedLora | None":
        """See LoraContext. Waits for the device."""
        if self._token_slots is None:
            return None
        count, slots = self._pool.experts, self._token_slots[tokens]
        # Rows of one expert and one adapter lie together, because a step's tokens are sorted by adapter.
        runs, lengths = torch.unique_consecutive(
            torch.where(slots < 0, -1, slots * count + experts), return_counts=True
        )
        changed = runs >= 0
        first, rows, adapter = (
            column[changed].int() for column in (lengths.cumsum(0) - lengths, lengths, runs)
        )
        work = WorkList(first, rows, adapter)
        return lambda layer, group, x: self._begin(layer, group, x, work)

    def factors(self, layer: int, module: str) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """See LoraContext."""
        for marks in self._arriving:
            marks[layer].wait()
        group = self._pool.shapes.sites[module].group
        (weights,), (table,) = self._pool.weight_pools[group][layer], self._pool.tables[group]
        work = self._work
        for first, count, slot in zip(
            work.first_row.tolist(), work.rows.tolist(), work.adapter.tolist(), strict=True
        ):
            rows = table.rows(slot)
            if len(rows):
                yield slice(first, first + count), weights.a[rows], weights.b[rows]

    @property
    def rescales(self) -> bool:
        """See LoraContext."""
        return self._deltas is not None

    def rescale(self, layer: int, group: str, ys: tuple[Tensor, ...]) -> None:
        """See LoraContext."""
        if self._deltas is not None:
            self._deltas.apply(layer, group, ys)

    def embed(self, tokens: Tensor, x: Tensor) -> None:
        """See LoraContext."""
        if self._deltas is not None:
            self._deltas.embed(tokens, x)

    @property
    def work(self) -> WorkList | None:
        """The work list, if it describes all adapters completely. None if an adapter of the step has non-LoRA
        deltas, changes experts, or is still being copied."""
        complete = self._deltas is None and not self._arriving and self._token_slots is None
        return self._work if complete else None

    def fused(self) -> LoraStep | None:
        """See LoraContext. None if `work` is None, or an adapter changes other modules than `MODULES`."""
        if self.work is None or self._pool.needing_layers(self.work.adapter.tolist()):
            return None
        return LoraStep(self._pool.stacks, self.work)
