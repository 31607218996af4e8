"""Calls the SGMV kernels: a plan once per step and group of modules, then shrink and expand.

Nothing here waits for the device. Block shapes follow from the number of packed rows, which the host knows;
who takes which adapter, and its ranks, stay on the device. So one captured graph serves any mix of adapters.
"""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from personae.kernels.sgmv import RANK_PAGE, Arena, RankTable, WorkList
from personae.kernels.triton.device.sgmv_expand import expand_kernel
from personae.kernels.triton.device.sgmv_plan import plan_kernel
from personae.kernels.triton.device.sgmv_shrink import shrink_kernel
from personae.kernels.triton.sizes import Gpu, ceil_div

VECTOR_ROWS = 4  # up to here a segment's rows are multiplied one by one, without tensor cores
SPLIT_K = 512  # the least inputs of a split
MOST_SPLITS = 16
PROGRAMS = 4  # of the fixed grid for each multiprocessor: as many as its registers hold at once

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Tiles:
    """Block shapes of a step: of `rows` packed rows per tile and what fits beside them."""

    rows: int
    shrink_ranks: int
    shrink_inputs: int
    vector_inputs: int
    expand_ranks: int
    expand_outputs: int


# A tile of 16 rows is the smallest that tensor cores take; from 64 on, Hopper's larger instructions apply.
SMALL = Tiles(
    rows=16, shrink_ranks=16, shrink_inputs=128, vector_inputs=512, expand_ranks=16, expand_outputs=256
)
LARGE = Tiles(
    rows=64, shrink_ranks=64, shrink_inputs=64, vector_inputs=64, expand_ranks=32, expand_outputs=128
)


def tiles_for(tokens: int) -> Tiles:
    """The block shapes of a step of this many packed rows."""
    return SMALL if tokens <= LARGE.rows else LARGE


def splits_for(tokens: int, inputs: int) -> int:
    """How many parts the inputs are summed in: many where few rows would leave the device idle. Few different
    ones, as each is compiled for."""
    most = MOST_SPLITS if tokens <= LARGE.rows else 4 if tokens <= 512 else 1
    parts = max(1, min(most, inputs // SPLIT_K))
    return ceil_div(inputs, split_length(inputs, parts))


def split_length(inputs: int, splits: int) -> int:
    """The inputs of one split; a multiple of every block, so that no split but the last is ragged."""
    return ceil_div(inputs, splits * 256) * 256


@dataclass(frozen=True, slots=True)
class Plan:
    """What the layers of a step share for one group of modules; see `plan_kernel` for the tensors."""

    ends: Tensor
    ranks: Tensor
    pages: Tensor
    tables: tuple[RankTable, ...]  # kept, because the plan is found by their identity


def padded_segments(count: int, tiles: Tiles) -> int:
    """The compiled length of the list: few different ones, so that few kernels are compiled."""
    length = 64 if tiles is SMALL else 256  # of few rows there are no more segments
    while length < count:
        length *= 4
    return length


def make_plan(
    tables: tuple[RankTable, ...], outputs: tuple[int, ...], work: WorkList, tiles: Tiles, splits: int
) -> Plan:
    """One launch that turns the work list and the rank tables into the step's plan."""
    segments, width = work.rows.shape[0], sum(table.pages.shape[1] for table in tables)
    device = work.rows.device
    plan = Plan(
        ends=torch.empty(2, segments, dtype=torch.int32, device=device),
        ranks=torch.empty(segments, 4, dtype=torch.int32, device=device),
        pages=torch.empty(segments, width, dtype=torch.int32, device=device),
        tables=tables,
    )
    three = _three(tables)
    plan_kernel[(segments + 1,)](
        work.rows,
        work.adapter,
        *(table.rank for table in three),
        *(table.pages for table in three),
        *(table.pages.stride(0) for table in three),
        *(ceil_div(width, tiles.expand_outputs) for width in _three(outputs)),
        plan.ends,
        plan.ranks,
        plan.pages,
        segments,
        width,
        MODULES=len(tables),
        SPLITS=splits,
        ROWS=tiles.rows,
        RANKS=tiles.shrink_ranks,
        SEGMENTS=padded_segments(segments, tiles),
        CHUNK=32,
    )
    return plan


def sgmv(
    x: Tensor,
    ys: tuple[Tensor, ...],
    arenas: tuple[Arena, ...],
    tables: tuple[RankTable, ...],
    work: WorkList,
    gpu: Gpu,
) -> None:
    """See `reference.sgmv`; up to three modules, features contiguous."""
    segments, (tokens, inputs) = work.rows.shape[0], x.shape
    if not segments or not tokens:
        return
    tiles = tiles_for(tokens)
    splits = splits_for(tokens, inputs)
    outputs = tuple(y.shape[1] for y in ys)
    key = (tuple(map(id, tables)), outputs, tokens, inputs)
    plan = work.plans.get(key)
    if plan is None:
        plan = work.plans[key] = make_plan(tables, outputs, work, tiles, splits)

    width = plan.pages.shape[1]
    planes = torch.empty(splits, tokens, width * RANK_PAGE, dtype=torch.float32, device=x.device)
    lists = work.first_row, work.rows, plan.ends, plan.ranks, plan.pages
    shared = {
        "MODULES": len(ys),
        "SPLITS": splits,
        "ROWS": tiles.rows,
        "VECTOR_ROWS": VECTOR_ROWS,
        "SEGMENTS": padded_segments(segments, tiles),
        "EARLY": gpu.hopper,
    }
    three = _three(arenas)
    shrink_kernel[(gpu.processors * PROGRAMS,)](
        x,
        *(arena.a for arena in three),
        planes,
        *lists,
        tokens,
        inputs,
        x.stride(0),
        width,
        segments,
        split_length(inputs, splits),
        RANKS=tiles.shrink_ranks,
        BLOCK_K=tiles.shrink_inputs,
        VECTOR_K=tiles.vector_inputs,
        ALIGNED=inputs * x.element_size() % 16 == 0 and all(arena.a.data_ptr() % 16 == 0 for arena in arenas),
        num_warps=4,
        num_stages=3,
        **shared,
    )
    expand_kernel[(gpu.processors * PROGRAMS,)](
        planes,
        *(arena.b for arena in three),
        *_three(ys),
        *lists,
        tokens,
        *(y.stride(0) for y in _three(ys)),
        *_three(outputs),
        width,
        segments,
        RANKS=tiles.expand_ranks,
        BLOCK_OUT=tiles.expand_outputs,
        VECTOR_RANKS=16,
        num_warps=4,
        num_stages=1,  # there are few ranks to loop over
        launch_pdl=gpu.hopper,  # shrink lets it begin: see EARLY
        **shared,
    )


def _three(items: tuple[Item, ...]) -> tuple[Item, ...]:
    """Padded to the kernels' three modules; the padding is not read."""
    return items + (items[0],) * (3 - len(items))
