"""The truth: each operator in a few lines of torch, with its equation. Every backend is tested against it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from personae.kernels.sgmv import Arena, RankTable, WorkList


def sgmv(
    x: Tensor,
    ys: tuple[Tensor, ...],
    arenas: tuple[Arena, ...],
    tables: tuple[RankTable, ...],
    work: WorkList,
) -> None:
    """y_m[i] += (x[i] A_m^T) B_m^T for each listed row i and module m (https://arxiv.org/abs/2310.18547).

    x: [T, in], ys: [T, out_m] each, changed in place (may be strided). A_m: [rank, in] and B_m^T: [rank,
    out_m] are the adapter's rows of arenas[m], found through tables[m]. Low precision is summed in float32
    and rounded once.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    segments = zip(work.first_row.tolist(), work.rows.tolist(), work.adapter.tolist(), strict=True)
    for first, count, slot in segments:
        segment = slice(first, first + count)
        xs = x[segment].to(wide)
        for y, arena, table in zip(ys, arenas, tables, strict=True):
            rows = table.rows(slot)
            if len(rows):
                shrunk = xs @ arena.a[rows].to(wide).T
                y[segment] = (y[segment].to(wide) + shrunk @ arena.b[rows].to(wide)).to(y.dtype)
