"""From the rows of a step to the adapters' updates inside a model's layers."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from personae.kernels.decoder import LoraStep
from personae.kernels.sgmv import WorkList, sgmv
from personae.kernels.upload import uploads
from personae.lora.copies import Mark
from personae.lora.extras import StepExtras
from personae.lora.pool import LoraPool


class LoraLayers(Protocol):
    """What a model's layer calls after its base linears, to let adapters add their updates."""

    def apply(self, layer: int, group: str, x: Tensor, ys: tuple[Tensor, ...]) -> None:
        """Add the updates of a group of modules, which read the same x, to their outputs, in place.

        group: "qkv" (ys = q, k, v), "o", "gate_up" (ys = gate, up) or "down". x: [T, in], ys: [T, out_m]
        each, which may be strided slices of one tensor.
        """

    def embed(self, tokens: Tensor, x: Tensor) -> None:
        """Change the embedded rows x: [T, hidden] of tokens: [T], in place."""

    def fused(self) -> LoraStep | None:
        """The adapters of all layers, for a forward pass in one call."""


def segments_of(slots: Sequence[int | None], counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first row, rows, slot) of a step whose row i has counts[i] >= 1 packed tokens and takes the adapter
    slots[i], None being the base model.

    Neighbours with one adapter become one segment, so rows sorted by adapter make the shortest list.
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
    """The work list of `segments_of(slots, counts)`. One copy to the device."""
    return _on_device(segments_of(slots, counts), device)


def _on_device(segments: Sequence[tuple[int, int, int]], device: torch.device) -> WorkList:
    columns = np.array(segments, np.int32).reshape(-1, 3).T
    first_row, rows, adapter = uploads(tuple(columns), device)
    return WorkList(first_row, rows, adapter)


def lora_batch(pool: LoraPool, slots: Sequence[int | None], counts: Sequence[int]) -> "LoraBatch | None":
    """The LoraLayers of a step, its rows as for `segments_of`; None if there is no adapter in it."""
    segments = segments_of(slots, counts)
    if not segments:
        return None
    arriving = pool.arriving({slot for _, _, slot in segments})
    return LoraBatch(pool, _on_device(segments, pool.device), pool.extras.of_step(segments), arriving)


class LoraBatch:
    """One step's LoraLayers: the pool's adapters applied to the rows of a work list.

    arriving: for each adapter that may not all be there yet the marks of its layers.
    """

    def __init__(
        self,
        pool: LoraPool,
        work: WorkList,
        extras: StepExtras | None = None,
        arriving: Sequence[Sequence[Mark]] = (),
    ) -> None:
        self._pool = pool
        self._work = work
        self._extras = extras
        self._arriving = arriving

    def apply(self, layer: int, group: str, x: Tensor, ys: tuple[Tensor, ...]) -> None:
        """See LoraLayers."""
        for marks in self._arriving:
            marks[layer].wait()
        if self._extras is not None:
            self._extras.apply(layer, group, ys)
        sgmv(x, ys, self._pool.arenas(layer, group), self._pool.tables(group), self._work)

    def embed(self, tokens: Tensor, x: Tensor) -> None:
        """See LoraLayers."""
        if self._extras is not None:
            self._extras.embed(tokens, x)

    @property
    def work(self) -> WorkList | None:
        """The work list, if it is all that there is: None when an adapter of the step is more than ranks, or
        still on its way."""
        return self._work if self._extras is None and not self._arriving else None

    def fused(self) -> LoraStep | None:
        """See LoraLayers. None where `work` is."""
        return LoraStep(self._pool.stacks, self._work) if self.work is not None else None
