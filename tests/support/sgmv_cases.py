"""Cases for SGMV: adapters in poisoned pools, popularity, and the reference as one product per row."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from personae.kernels.sgmv import RANK_PAGE, RankTable, WeightPool, WorkList

RANKS = {
    "rank 0": [0, 0, 0, 0],
    "rank 1": [1, 1, 1, 1],
    "rank 8": [8, 8, 8, 8],
    "rank 16": [16, 16, 16, 16],
    "rank 64": [64, 64, 64, 64],
    "mixed": [0, 1, 13, 64],
}
POPULARITY: dict[str, list[int | None]] = {
    "identical": [2] * 12,
    "skewed": [*[3] * 8, 0, 1, 2, 2],
    "uniform": [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3],
    "distinct": [0, 1, 2, 3],
    "with base rows": [None, 1, 1, None, None, 3, 3, 2, None],
    "base alone": [None] * 5,
    "scattered": [3, 0, 3, None, 0, 3],
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


@dataclass
class Module:
    weight_pool: WeightPool
    table: RankTable
    dense: list[tuple[Tensor, Tensor]]  # per slot: A [rank, in], B^T [rank, out], float64


def make_module(ranks: list[int], inputs: int, outputs: int, dtype: torch.dtype, seed: int) -> Module:
    """Adapters on shuffled pages of a pool whose other rows are all poison."""
    random = torch.Generator().manual_seed(seed)
    counts = [-(-rank // RANK_PAGE) for rank in ranks]
    num_pages = sum(counts) + 3
    order = torch.randperm(num_pages, generator=random).tolist()
    a = torch.full((num_pages * RANK_PAGE, inputs), torch.nan, dtype=dtype)
    b = torch.full((num_pages * RANK_PAGE, outputs), torch.nan, dtype=dtype)
    pages = torch.full((len(ranks), max(counts) + 1), 10**6, dtype=torch.int32)
    dense = []
    for slot, (rank, count) in enumerate(zip(ranks, counts, strict=True)):
        own = [order.pop() for _ in range(count)]
        pages[slot, :count] = torch.tensor(own, dtype=torch.int32)
        rows = [own[r // RANK_PAGE] * RANK_PAGE + r % RANK_PAGE for r in range(rank)]
        a[rows] = (torch.randn(rank, inputs, generator=random) / inputs**0.5).to(dtype)
        b[rows] = (torch.randn(rank, outputs, generator=random) / max(rank, 1) ** 0.5).to(dtype)
        dense.append((a[rows].double(), b[rows].double()))
    return Module(WeightPool(a, b), RankTable(torch.tensor(ranks, dtype=torch.int32), pages), dense)


def make_work(adapters: list[int | None], copies: int) -> tuple[WorkList, list[int | None]]:
    """Each listed entry becomes a run of `copies` rows. Adjacent runs of one adapter form one segment."""
    per_row = [adapter for adapter in adapters for _ in range(copies)]
    segments: list[list[int]] = []
    for row, adapter in enumerate(per_row):
        if adapter is None:
            continue
        if row and per_row[row - 1] == adapter:
            segments[-1][1] += 1
        else:
            segments.append([row, 1, adapter])
    columns = torch.tensor(segments, dtype=torch.int32).reshape(-1, 3).T.contiguous()
    return WorkList(columns[0], columns[1], columns[2]), per_row


def naive(x: Tensor, y: Tensor, module: Module, per_row: list[int | None]) -> Tensor:
    expected = y.double()
    for row, adapter in enumerate(per_row):
        if adapter is not None:
            a, b = module.dense[adapter]
            expected[row] += (x[row].double() @ a.T) @ b
    return expected


def check_sgmv(
    sgmv: Callable[..., None],
    ranks: list[int],
    adapters: list[int | None],
    *,
    copies: int = 1,
    inputs: int = 32,
    outputs: tuple[int, ...] = (32, 16, 16),
    dtype: torch.dtype = torch.float32,
) -> None:
    modules = [
        make_module(ranks[m:] + ranks[:m], inputs, width, dtype, seed=m) for m, width in enumerate(outputs)
    ]
    work, per_row = make_work(adapters, copies)
    x = torch.randn(len(per_row), inputs, generator=torch.Generator().manual_seed(7)).to(dtype)
    fused = torch.randn(len(per_row), sum(outputs) + 5, generator=torch.Generator().manual_seed(8)).to(dtype)
    before = fused.clone()
    ys = fused[:, : sum(outputs)].split(list(outputs), dim=1)
    expected = [naive(x, y.clone(), module, per_row) for y, module in zip(ys, modules, strict=True)]
    sgmv(x, tuple(ys), tuple(m.weight_pool for m in modules), tuple(m.table for m in modules), work)
    for y, truth in zip(ys, expected, strict=True):
        torch.testing.assert_close(y.double(), truth, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(fused[:, sum(outputs) :], before[:, sum(outputs) :])
    base = [row for row, adapter in enumerate(per_row) if adapter is None]
    assert torch.equal(fused[base], before[base])
