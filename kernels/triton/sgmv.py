"""Launches the SGMV kernels: a plan once per step and group of modules, then shrink and expand.

There are two orders. In `sgmv` expand follows shrink, and begins while shrink still computes. In `begin_sgmv`
shrink runs on a side stream, in parallel with the base's product, and expand follows both.

Nothing here waits for the device. Block shapes follow from the number of packed rows, which the host knows.
Which rows take which adapter, and its ranks, stay on the device. So one captured graph serves any mix of
adapters.
"""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from personae.kernels.sgmv import RANK_PAGE, Finish, RankTable, WeightPool, WorkList
from personae.kernels.side_stream import SideStream
from personae.kernels.triton.device.sgmv_expand import expand_kernel
from personae.kernels.triton.device.sgmv_plan import plan_kernel
from personae.kernels.triton.device.sgmv_shrink import shrink_kernel
from personae.kernels.triton.sizes import Gpu, ceil_div

VECTOR_ROWS = 4  # rows of a segment up to which each is multiplied alone, without tensor cores
SPLIT_K = 512  # the fewest inputs of a split
MOST_SPLITS = 16
PROGRAMS = 4  # of the fixed grid, per multiprocessor: as many as its registers hold at once
SIDE_STREAM_PROGRAMS = (
    2  # the same for shrink on a side stream: the base's product has the other half of the registers
)

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Tiles:
    """Block shapes of a step: `rows` packed rows per tile, and the shapes that fit with them."""

    rows: int
    shrink_ranks: int
    shrink_inputs: int
    vector_inputs: int
    expand_ranks: int
    expand_outputs: int


# Tensor cores need at least 16 rows per tile. From 64 rows on, Hopper has larger instructions.
SMALL = Tiles(
    rows=16, shrink_ranks=16, shrink_inputs=128, vector_inputs=512, expand_ranks=16, expand_outputs=256
)
LARGE = Tiles(
    rows=64, shrink_ranks=64, shrink_inputs=64, vector_inputs=64, expand_ranks=32, expand_outputs=128
)


def tiles_for(tokens: int) -> Tiles:
    """The block shapes of a step with this many packed rows."""
    return SMALL if tokens <= LARGE.rows else LARGE


def splits_for(tokens: int, inputs: int) -> int:
    """How many parts the sum over the inputs is split into: many if few rows would leave the device idle.
    There are only a few different results, because kernels are compiled for each."""
    most = MOST_SPLITS if tokens <= LARGE.rows else 4 if tokens <= 512 else 1
    parts = max(1, min(most, inputs // SPLIT_K))
    return ceil_div(inputs, split_length(inputs, parts))


def split_length(inputs: int, splits: int) -> int:
    """The inputs of one split: a multiple of every block, so that only the last split is ragged."""
    return ceil_div(inputs, splits * 256) * 256


@dataclass(frozen=True, slots=True)
class SgmvPlan:
    """The plan that a step's layers share for one group of modules; see `plan_kernel` for the tensors."""

    ends: Tensor
    ranks: Tensor
    pages: Tensor
    tables: tuple[RankTable, ...]  # kept alive, because the plan's key has their ids


def padded_segments(count: int, tiles: Tiles) -> int:
    """The compiled length of the list. There are few different ones, so that few kernels are compiled."""
    length = 64 if tiles is SMALL else 256  # SMALL has at most 64 rows, and so at most 64 segments
    while length < count:
        length *= 4
    return length


class Update:
    """The launches for one group of modules in one layer: `shrink`, then `expand`, in this order on the
    device. The constructor allocates all memory, on the current stream.

    x: [T, in] with T > 0. At least one segment, and up to three modules. early: expand begins during shrink,
    and must be the next launch after it.
    """

    def __init__(
        self,
        x: Tensor,
        weight_pools: tuple[WeightPool, ...],
        tables: tuple[RankTable, ...],
        work: WorkList,
        gpu: Gpu,
        *,
        early: bool,
    ) -> None:
        self._x, self._weight_pools, self._work, self._gpu, self._early = x, weight_pools, work, gpu, early
        segments, (tokens, inputs) = work.rows.shape[0], x.shape
        self._tiles = tiles_for(tokens)
        self._splits = splits_for(tokens, inputs)
        self._outputs = tuple(weight_pool.b.shape[1] for weight_pool in weight_pools)
        key = (tuple(map(id, tables)), self._outputs, tokens, inputs)
        plan = work.plans.get(key)
        self._planned = plan is not None
        if plan is None:
            width = sum(table.pages.shape[1] for table in tables)
            plan = work.plans[key] = SgmvPlan(
                ends=torch.empty(2, segments, dtype=torch.int32, device=x.device),
                ranks=torch.empty(segments, 4, dtype=torch.int32, device=x.device),
                pages=torch.empty(segments, width, dtype=torch.int32, device=x.device),
                tables=tables,
            )
        self._plan: SgmvPlan = plan
        self._width = plan.pages.shape[1]
        self._planes = torch.empty(
            self._splits, tokens, self._width * RANK_PAGE, dtype=torch.float32, device=x.device
        )
        self._shared = {
            "MODULES": len(weight_pools),
            "SPLITS": self._splits,
            "ROWS": self._tiles.rows,
            "SEGMENTS": padded_segments(segments, self._tiles),
        }

    def shrink(self, programs: int) -> None:
        """Launch x A^T with `programs` per multiprocessor. The plan is launched first if the step has none
        yet."""
        if not self._planned:
            self._make_plan()
        x, weight_pools, tiles = self._x, self._weight_pools, self._tiles
        tokens, inputs = x.shape
        shrink_kernel[(self._gpu.processors * programs,)](
            x,
            *(weight_pool.a for weight_pool in _pad_to_three(weight_pools)),
            self._planes,
            *self._lists(),
            tokens,
            inputs,
            x.stride(0),
            self._width,
            self._work.rows.shape[0],
            split_length(inputs, self._splits),
            RANKS=tiles.shrink_ranks,
            BLOCK_K=tiles.shrink_inputs,
            VECTOR_K=tiles.vector_inputs,
            ALIGNED=inputs * x.element_size() % 16 == 0
            and all(weight_pool.a.data_ptr() % 16 == 0 for weight_pool in weight_pools),
            VECTOR_ROWS=VECTOR_ROWS,
            EARLY=self._gpu.hopper,  # a kernel that is not launched early still waits for its end
            num_warps=4,
            num_stages=3,
            **self._shared,
        )

    def expand(self, ys: tuple[Tensor, ...]) -> None:
        """Launch the product with B, which is added to ys."""
        expand_kernel[(self._gpu.processors * PROGRAMS,)](
            self._planes,
            *(weight_pool.b for weight_pool in _pad_to_three(self._weight_pools)),
            *_pad_to_three(ys),
            *self._lists(),
            self._x.shape[0],
            *(y.stride(0) for y in _pad_to_three(ys)),
            *_pad_to_three(self._outputs),
            self._width,
            self._work.rows.shape[0],
            RANKS=self._tiles.expand_ranks,
            BLOCK_OUT=self._tiles.expand_outputs,
            VECTOR_RANKS=16,
            VECTOR_ROWS=VECTOR_ROWS,
            EARLY=self._early,
            num_warps=4,
            num_stages=1,  # the loop over ranks is short
            launch_pdl=self._early,  # shrink allows it to begin early: see EARLY
            **self._shared,
        )

    def _lists(self) -> tuple[Tensor, ...]:
        work, plan = self._work, self._plan
        return work.first_row, work.rows, plan.ends, plan.ranks, plan.pages

    def _make_plan(self) -> None:
        """Launch the kernel that makes the step's plan from the work list and the rank tables."""
        plan, three = self._plan, _pad_to_three(self._plan.tables)
        segments = self._work.rows.shape[0]
        plan_kernel[(segments + 1,)](
            self._work.rows,
            self._work.adapter,
            *(table.rank for table in three),
            *(table.pages for table in three),
            *(table.pages.stride(0) for table in three),
            *(ceil_div(outputs, self._tiles.expand_outputs) for outputs in _pad_to_three(self._outputs)),
            plan.ends,
            plan.ranks,
            plan.pages,
            segments,
            self._width,
            RANKS=self._tiles.shrink_ranks,
            CHUNK=32,
            **self._shared,
        )


def sgmv(
    x: Tensor,
    ys: tuple[Tensor, ...],
    weight_pools: tuple[WeightPool, ...],
    tables: tuple[RankTable, ...],
    work: WorkList,
    gpu: Gpu,
) -> None:
    """See `reference.sgmv`. Up to three modules; features are contiguous."""
    if work.rows.shape[0] and x.shape[0]:
        update = Update(x, weight_pools, tables, work, gpu, early=gpu.hopper)
        update.shrink(PROGRAMS)
        update.expand(ys)


def begin_sgmv(
    x: Tensor,
    weight_pools: tuple[WeightPool, ...],
    tables: tuple[RankTable, ...],
    work: WorkList,
    side_stream: SideStream,
    gpu: Gpu,
) -> Finish:
    """See `kernels.sgmv.sgmv_calls`. The same limits as `sgmv`.

    Expand does not begin early, because it also follows the base's product, which is not launched here.
    """
    if not work.rows.shape[0] or not x.shape[0]:
        return lambda ys: None
    update = Update(x, weight_pools, tables, work, gpu, early=False)
    with side_stream.fork():
        update.shrink(SIDE_STREAM_PROGRAMS)

    def finish(ys: tuple[Tensor, ...]) -> None:
        side_stream.join()
        update.expand(ys)

    return finish


def _pad_to_three(items: tuple[Item, ...]) -> tuple[Item, ...]:
    """Padded to the kernels' three modules. The kernels do not read the padding."""
    return items + (items[0],) * (3 - len(items))
