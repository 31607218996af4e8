"""Cases of SGMV for the interpreter; see `cases.py`."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from personae.kernels import reference
from personae.kernels.sgmv import RANK_PAGE, RankTable, WeightPool, WorkList
from personae.kernels.triton.sgmv import begin_sgmv, sgmv
from personae.kernels.triton.sizes import Gpu, ceil_div
from ptx.cases import Case, Check, untouched_outside
from ptx.launches import unwritten, watched
from ptx.stages_lora import LoraStages

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}


class OneStream:
    """A branch that is none."""

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Nothing."""
        yield

    def join(self) -> None:
        """Nothing."""


class Given(TypedDict, total=False):
    """What a case has instead of dice. ranks: by adapter; adapters: by row."""

    outputs: tuple[int, ...]
    inputs: int
    ranks: list[int]
    adapters: list[int | None]
    dtype: torch.dtype
    beside: bool
    processors: int


COPIES = (1, 2, 4, 5, 17, 40)  # of a row, one after the other
RANKS = (0, 1, 4, 8, 16, 24, 33, 64)


def lora(seed: int, capability: int, **given: Unpack[Given]) -> Case:
    """Up to three modules and five adapters."""
    dice = random.Random(seed)
    outputs = tuple(dice.choice((64, 96, 256, 384, 320)) for _ in range(dice.randint(1, 3)))
    inputs, count = dice.choice((64, 192, 576, 1024, 1536)), dice.randint(1, 5)
    mixed = [dice.choice(RANKS) for _ in range(count)]
    adapters: list[int | None] = []
    for adapter in dice.sample(range(count), dice.randint(1, count)):
        adapters += [adapter] * dice.choice(COPIES)
    for _ in range(dice.randint(0, 2)):
        adapters.insert(dice.choice((0, len(adapters))), None)
    dtype = dice.choice((torch.bfloat16, torch.float16))
    beside, spare = dice.random() < 0.5, dice.randint(0, 2)
    processors = dice.choice((1, 2, 3))
    outputs, inputs = given.get("outputs", outputs), given.get("inputs", inputs)
    mixed, adapters = given.get("ranks", mixed), given.get("adapters", adapters)
    dtype, beside = given.get("dtype", dtype), given.get("beside", beside)
    gpu = Gpu(given.get("processors", processors), hopper=capability == 90)
    text = (
        f"lora {seed}: ranks {mixed}, rows {adapters}, {inputs} to {outputs}, {dtype}, {gpu}, beside {beside}"
    )

    def run() -> list[Check]:
        torch.manual_seed(seed)
        # Each module has other ranks.
        turned = ([*mixed[module:], *mixed[:module]] for module in range(len(outputs)))
        pools, tables = zip(
            *(_module(own, inputs, out, dtype) for own, out in zip(turned, outputs, strict=True)), strict=True
        )
        work, rows, width = _work(adapters, spare), len(adapters), sum(outputs)
        x = unwritten(rows, inputs + 16, dtype=dtype)[:, :inputs].copy_(torch.randn(rows, inputs))
        whole = unwritten(rows, width + 8, dtype=dtype)
        whole[:, :width] = torch.randn(rows, width)
        before, truth = whole.clone(), whole[:, :width].double()
        wide = tuple(WeightPool(pool.a.double(), pool.b.double()) for pool in pools)
        reference.sgmv(x.double(), truth.split(outputs, 1), wide, tables, work)
        ys = whole[:, :width].split(outputs, 1)
        stages = LoraStages(x, pools, tables, work)
        with watched(stages.look):
            if beside:
                begin_sgmv(x, pools, tables, work, OneStream(), gpu)(ys)
            else:
                sgmv(x, ys, pools, tables, work, gpu)
        own = torch.zeros(rows, width + 8, dtype=torch.bool)
        own[[adapter is not None for adapter in adapters], :width] = True
        result = Check(whole[:, :width], truth, TOLERANCE[dtype])
        return [result, untouched_outside(whole, before, own), *stages.checks]

    return Case(text, run)


def _module(ranks: list[int], inputs: int, outputs: int, dtype: torch.dtype) -> tuple[WeightPool, RankTable]:
    """Adapters on pages in any order; what is past a rank, and pages of nobody, has never been written."""
    need = [ceil_div(rank, RANK_PAGE) for rank in ranks]
    pages = sum(need) + 2
    order = (
        1 + torch.randperm(pages - 1)
    ).tolist()  # page 0, which a kernel has where there is none: nobody's
    a, b = (unwritten(pages * RANK_PAGE, size, dtype=dtype) for size in (inputs, outputs))
    table = unwritten(len(ranks), max(need) + 1, dtype=torch.int32)
    for slot, (rank, count) in enumerate(zip(ranks, need, strict=True)):
        own = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int64)
        table[slot, :count] = own
        at = torch.arange(rank)
        rows = own[at // RANK_PAGE] * RANK_PAGE + at % RANK_PAGE
        a[rows] = (torch.randn(rank, inputs) / inputs**0.5).to(dtype)
        b[rows] = (torch.randn(rank, outputs) / max(rank, 1) ** 0.5).to(dtype)
    return WeightPool(a, b), RankTable(torch.tensor(ranks, dtype=torch.int32), table)


def _work(adapters: list[int | None], spare: int) -> WorkList:
    """Runs of rows of one adapter, and `spare` segments without rows."""
    segments: list[list[int]] = []
    for row, adapter in enumerate(adapters):
        if adapter is None:
            continue
        if segments and segments[-1][2] == adapter and sum(segments[-1][:2]) == row:
            segments[-1][1] += 1
        else:
            segments.append([row, 1, adapter])
    columns: Tensor = torch.tensor([*segments, *[[0, 0, 0]] * spare], dtype=torch.int32).T.contiguous()
    return WorkList(columns[0], columns[1], columns[2])
