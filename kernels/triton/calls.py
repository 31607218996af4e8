"""The Triton operators with the reference's signatures; what they do not take, the reference does."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from personae.kernels import reference
from personae.kernels.sgmv import Arena, RankTable, WorkList
from personae.kernels.triton import sgmv as triton_sgmv

TYPES = (torch.float32, torch.float16, torch.bfloat16)
PROGRAMS_PER_PROCESSOR = 4  # of SGMV's fixed grid


class TritonOperators:
    """Calls into the kernels. processors: the device's streaming multiprocessors."""

    def __init__(self, processors: int) -> None:
        self.processors = processors

    def by_name(self) -> dict[str, Callable[..., Any]]:
        """The operators under the reference's names."""
        return {name: getattr(self, name) for name in ("sgmv",)}

    def sgmv(
        self,
        x: Tensor,
        ys: tuple[Tensor, ...],
        arenas: tuple[Arena, ...],
        tables: tuple[RankTable, ...],
        work: WorkList,
    ) -> None:
        """See `reference.sgmv`."""
        rows_contiguous = all(y.stride(1) == 1 for y in (x, *ys))
        if x.dtype not in TYPES or len(ys) > 3 or not rows_contiguous:
            reference.sgmv(x, ys, arenas, tables, work)
            return
        triton_sgmv.sgmv(x, ys, arenas, tables, work, self.processors * PROGRAMS_PER_PROCESSOR)
