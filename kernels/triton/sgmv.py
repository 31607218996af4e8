"""Launches the SGMV kernels: a plan once per step and group of modules, then shrink and expand.

There are two orders. In `sgmv` expand follows shrink, and begins while shrink still computes. In `begin_sgmv`
shrink runs on a side stream, in parallel with the base's product, and expand follows both.

Nothing here waits for the device. Block shapes follow from the number of packed rows, which the host knows.
Which rows take which adapter, and its ranks, stay on the device. So one captured graph serves any mix of
adapters.
"""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from personae.kernels.sgmv import RANK_PAGE, RankTable, WeightPool, WorkList
from personae.kernels.sgmv_calls import Finish
from personae.kernels.side_stream import SideStream
from personae.kernels.triton.device.sgmv_expand import expand_kernel
from personae.kernels.triton.device.sgmv_plan import plan_kernel
from personae.kernels.triton.device.sgmv_shrink import shrink_kernel
from personae.kernels.triton.launch import ALIGNMENT, Launch, ReadyLaunch, launch
from personae.kernels.triton.sizes import FENCES, Gpu, ceil_div

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


def padded_segments(count: int, tiles: Tiles) -> int:
    """The compiled length of the list. There are few different ones, so that few kernels are compiled."""
    length = 64 if tiles is SMALL else 256  # SMALL has at most 64 rows, and so at most 64 segments
    while length < count:
        length *= 4
    return length


class SgmvPlan:
    """What a step's layers share for one group of modules: the lists that `plan_kernel` makes (see there for
    the tensors), memory for the split sums, and the launches.

    x: of one layer, [T, in] with T > 0. At least one segment, and up to three modules.
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
        segments, (tokens, inputs) = work.rows.shape[0], x.shape
        width = sum(table.pages.shape[1] for table in tables)
        splits = splits_for(tokens, inputs)
        self.tables = tables  # kept alive, because the plan's key has their id
        self.made = False
        self._work, self._width, self._tiles = work, width, tiles_for(tokens)
        empty = partial(torch.empty, dtype=torch.int32, device=x.device)
        self._ends, self._ranks, self._pages = empty(2, segments), empty(segments, 4), empty(segments, width)
        self.lists = work.first_row, work.rows, self._ends, self._ranks, self._pages
        self.planes = _planes(work, (splits, tokens, width * RANK_PAGE), x.device)
        self._outputs = _pad_to_three(tuple(weight_pool.b.shape[1] for weight_pool in weight_pools))
        self.shrink_numbers = tokens, inputs, x.stride(0), width, segments, split_length(inputs, splits)
        self.tokens, self.tail = tokens, (*self._outputs, width, segments)
        self._aligned = inputs * x.element_size() % 16 == 0
        self._hopper = gpu.hopper
        self._shared = {
            "MODULES": len(tables),
            "SPLITS": splits,
            "ROWS": self._tiles.rows,
            "SEGMENTS": padded_segments(segments, self._tiles),
        }
        self._shrink: dict[bool, Launch] = {}
        self.list_addresses = tuple([tensor.data_ptr() for tensor in (self.planes, *self.lists)])
        # What the first layer has launched, for layers whose tensors are aligned, too.
        self.shrink_ready: ReadyLaunch | None = None
        self.expand_ready: dict[tuple[int, ...], ReadyLaunch] = {}  # by the strides of ys
        self.expand = launch(
            expand_kernel,
            RANKS=self._tiles.expand_ranks,
            BLOCK_OUT=self._tiles.expand_outputs,
            VECTOR_RANKS=16,
            VECTOR_ROWS=VECTOR_ROWS,
            EARLY=early,
            num_warps=4,
            num_stages=1,  # the loop over ranks is short
            launch_pdl=early,  # shrink allows it to begin early: see EARLY
            **self._shared,
        )

    def shrink(self, a: tuple[Tensor, Tensor, Tensor]) -> Launch:
        """Of a layer with these weights."""
        together = a[0].data_ptr() | a[1].data_ptr() | a[2].data_ptr()
        aligned = self._aligned and together % 16 == 0
        found = self._shrink.get(aligned)
        if found is None:
            found = self._shrink[aligned] = launch(
                shrink_kernel,
                RANKS=self._tiles.shrink_ranks,
                BLOCK_K=self._tiles.shrink_inputs,
                VECTOR_K=self._tiles.vector_inputs,
                ALIGNED=aligned,
                VECTOR_ROWS=VECTOR_ROWS,
                EARLY=self._hopper,  # a kernel that is not launched early still waits for its end
                num_warps=4,
                num_stages=3 if FENCES or not self._hopper or self._tiles is SMALL else 1,
                **self._shared,
            )
        return found

    @staticmethod
    def aligned(tensors: tuple[Tensor, ...]) -> bool:
        """Whether all of them begin where kernels for aligned pointers may read."""
        return not any(tensor.data_ptr() % ALIGNMENT for tensor in tensors)

    def make(self) -> None:
        """One launch that turns the work list and the rank tables into the lists."""
        self.made = True
        three, segments = _pad_to_three(self.tables), self._work.rows.shape[0]
        run = launch(plan_kernel, RANKS=self._tiles.shrink_ranks, CHUNK=32, **self._shared)
        run(
            (segments + 1, 1, 1),
            (
                self._work.rows,
                self._work.adapter,
                *(table.rank for table in three),
                *(table.pages for table in three),
                self._ends,
                self._ranks,
                self._pages,
            ),
            (
                *(table.pages.stride(0) for table in three),
                *(ceil_div(outputs, self._tiles.expand_outputs) for outputs in self._outputs),
                segments,
                self._width,
            ),
        )


def _planes(work: WorkList, shape: tuple[int, int, int], device: torch.device) -> Tensor:
    """Memory for split sums, float32: the same for all groups of a step, which use it in turn."""
    memory: Tensor | None = work.plans.get("planes")
    if memory is None or len(memory) < prod(shape):
        memory = work.plans["planes"] = torch.empty(prod(shape), dtype=torch.float32, device=device)
    return memory[: prod(shape)].view(shape)


class Update:
    """The launches for one group of modules in one layer: `shrink`, then `expand`, in this order on the
    device. The constructor allocates all memory, for a step's first layer, on the current stream.

    x: [T, in] with T > 0. At least one segment, and up to three modules. early: expand begins during shrink,
    and must be the next launch after it.
    """

    __slots__ = ("_gpu", "_plan", "_weight_pools", "_x")

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
        key = id(tables), early, x.dtype, x.shape, x.stride(0), weight_pools[0].b.shape[1]
        plan = work.plans.get(key)
        if plan is None:
            plan = work.plans[key] = SgmvPlan(x, weight_pools, tables, work, gpu, early=early)
        self._plan: SgmvPlan = plan
        self._x, self._weight_pools, self._gpu = x, weight_pools, gpu

    def shrink(self, programs: int) -> None:
        """Launch x A^T with `programs` per multiprocessor. The plan is launched first if the step has none
        yet."""
        plan, grid = self._plan, (self._gpu.processors * programs, 1, 1)
        a0, a1, a2 = _pad_to_three(tuple([pool.a for pool in self._weight_pools]))
        if plan.shrink_ready is not None:
            own = self._x.data_ptr(), a0.data_ptr(), a1.data_ptr(), a2.data_ptr()
            if not (own[0] | own[1] | own[2] | own[3]) % ALIGNMENT:
                plan.shrink_ready(grid, (*own, *plan.list_addresses, *plan.shrink_numbers))
                return
        if not plan.made:
            plan.make()
        shrink, tensors = plan.shrink((a0, a1, a2)), (self._x, a0, a1, a2, plan.planes, *plan.lists)
        shrink(grid, tensors, plan.shrink_numbers)
        if plan.aligned(tensors):
            plan.shrink_ready = shrink.ready(tensors, plan.shrink_numbers)

    def expand(self, ys: tuple[Tensor, ...]) -> None:
        """Launch the product with B, which is added to ys."""
        plan, grid = self._plan, (self._gpu.processors * PROGRAMS, 1, 1)
        b0, b1, b2 = _pad_to_three(tuple([pool.b for pool in self._weight_pools]))
        y0, y1, y2 = _pad_to_three(ys)
        strides = y0.stride(0), y1.stride(0), y2.stride(0)
        ready = plan.expand_ready.get(strides)
        if ready is not None:
            b = b0.data_ptr(), b1.data_ptr(), b2.data_ptr()
            y = y0.data_ptr(), y1.data_ptr(), y2.data_ptr()
            if not (b[0] | b[1] | b[2] | y[0] | y[1] | y[2]) % ALIGNMENT:
                planes, *lists = plan.list_addresses
                ready(grid, (planes, *b, *y, *lists, plan.tokens, *strides, *plan.tail))
                return
        tensors = plan.planes, b0, b1, b2, y0, y1, y2, *plan.lists
        numbers = plan.tokens, *strides, *plan.tail
        plan.expand(grid, tensors, numbers)
        if plan.aligned(tensors) and (bound := plan.expand.ready(tensors, numbers)):
            plan.expand_ready[strides] = bound


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
    """See `kernels.sgmv_calls.sgmv_calls`. The same limits as `sgmv`.

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


def _pad_to_three(items: tuple[Item, ...]) -> tuple[Item, Item, Item]:
    """Padded to the kernels' three modules; the padding is not read."""
    first, *others = items
    second, third = (*others, first, first)[:2]
    return first, second, third
