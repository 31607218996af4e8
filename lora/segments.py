"""From the rows of a step to the adapters' updates inside a model's layers."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from personae.kernels.decoder import LoraStep
from personae.kernels.sgmv import WorkList, sgmv
from personae.lora.pool import LoraPool


class LoraLayers(Protocol):
    """What a model's layer calls after its base linears, to let adapters add their updates."""

    def apply(self, layer: int, group: str, x: Tensor, ys: tuple[Tensor, ...]) -> None:
        """Add the updates of a group of modules, which read the same x, to their outputs, in place.

        group: "qkv" (ys = q, k, v), "o", "gate_up" (ys = gate, up) or "down". x: [T, in], ys: [T, out_m]
        each, which may be strided slices of one tensor.
        """

    def fused(self) -> LoraStep | None:
        """The adapters of all layers, for a forward pass in one call."""


def work_list(slots: Sequence[int | None], counts: Sequence[int], device: torch.device) -> WorkList:
    """The work list of a step whose row i has counts[i] >= 1 packed tokens and takes the adapter slots[i].

    None is the base model. Neighbours with one adapter become one segment, so rows sorted by adapter make the
    shortest list. One copy to the device.
    """
    segments: list[list[int]] = []
    start, last = 0, None
    for slot, count in zip(slots, counts, strict=True):
        if slot is not None and slot == last:
            segments[-1][1] += count
        elif slot is not None:
            segments.append([start, count, slot])
        start, last = start + count, slot
    columns = torch.tensor(segments, dtype=torch.int32).reshape(-1, 3).T.contiguous().to(device)
    return WorkList(first_row=columns[0], rows=columns[1], adapter=columns[2])


class LoraBatch:
    """One step's LoraLayers: the pool's adapters applied to the rows of a work list."""

    def __init__(self, pool: LoraPool, work: WorkList) -> None:
        self._pool = pool
        self._work = work

    def apply(self, layer: int, group: str, x: Tensor, ys: tuple[Tensor, ...]) -> None:
        """See LoraLayers."""
        sgmv(x, ys, self._pool.arenas(layer, group), self._pool.tables(group), self._work)

    def fused(self) -> LoraStep:
        """See LoraLayers."""
        return LoraStep(self._pool.stacks, self._work)
