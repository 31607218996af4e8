"""SGMV in two calls, around the product that it is added to."""

from collections.abc import Callable

import torch
from torch import Tensor

from personae.kernels.operators import sgmv
from personae.kernels.registry import optional
from personae.kernels.sgmv import RankTable, WeightPool, WorkList
from personae.kernels.side_stream import SideStream

Finish = Callable[[tuple[Tensor, ...]], None]
"""Adds the updates to ys; see `sgmv_calls`."""

BeginSgmv = Callable[
    [Tensor, tuple[WeightPool, ...], tuple[RankTable, ...], WorkList, SideStream | None], Finish
]
"""(x, weight pools, tables, work list, side stream) -> a function that adds the updates to ys; see
`sgmv_calls`."""


def sgmv_calls(device: torch.device, dtype: torch.dtype) -> BeginSgmv:
    """`sgmv` in two calls: one before ys are computed, and one after, which is the returned function.

    With a side stream, on a device whose backend supports it, the first call begins x A^T there. It runs in
    parallel with what is launched until the second call; x must not change until then. Otherwise the second
    call does all the work. Raises KernelError.
    """
    whole, ahead = sgmv.on(device, dtype), optional("begin_sgmv", device, dtype)

    def begin(
        x: Tensor,
        weight_pools: tuple[WeightPool, ...],
        tables: tuple[RankTable, ...],
        work: WorkList,
        side_stream: SideStream | None,
    ) -> Finish:
        if side_stream is None or ahead is None:
            return lambda ys: whole(x, ys, weight_pools, tables, work)
        finish: Finish = ahead(x, weight_pools, tables, work, side_stream)
        return finish

    return begin
