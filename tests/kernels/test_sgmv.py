"""SGMV, the reference and this machine's, against one product per row: ranks, dtypes, popularity, strides."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from personae.kernels.registry import reference_only
from personae.kernels.sgmv import RANK_PAGE, Arena, RankTable, WorkList, sgmv

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


@pytest.fixture(params=["reference", "this machine's"], autouse=True)
def implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    with reference_only() if request.param == "reference" else nullcontext():
        yield


@dataclass
class Module:
    arena: Arena
    table: RankTable
    dense: list[tuple[Tensor, Tensor]]  # per slot: A [rank, in], B^T [rank, out], float64


def make_module(ranks: list[int], inputs: int, outputs: int, dtype: torch.dtype, seed: int) -> Module:
    """Adapters on shuffled pages of an arena whose every other row is poison."""
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
    return Module(Arena(a, b), RankTable(torch.tensor(ranks, dtype=torch.int32), pages), dense)


def make_work(adapters: list[int | None], copies: int) -> tuple[WorkList, list[int | None]]:
    """Each listed entry becomes a run of `copies` rows; neighbours of one adapter are one segment."""
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


def check(
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
    sgmv(x, tuple(ys), tuple(m.arena for m in modules), tuple(m.table for m in modules), work)
    for y, truth in zip(ys, expected, strict=True):
        torch.testing.assert_close(y.double(), truth, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(fused[:, sum(outputs) :], before[:, sum(outputs) :])
    base = [row for row, adapter in enumerate(per_row) if adapter is None]
    assert torch.equal(fused[base], before[base])


@pytest.mark.parametrize("popularity", POPULARITY)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_mix_of_ranks_and_adapters_equals_one_product_per_row(ranks: str, popularity: str) -> None:
    check(RANKS[ranks], POPULARITY[popularity])


@pytest.mark.parametrize("copies", [1, 3, 17])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_dtype_equals_one_product_per_row(dtype: torch.dtype, copies: int) -> None:
    check(RANKS["mixed"], POPULARITY["with base rows"], copies=copies, dtype=dtype)


@pytest.mark.parametrize(("inputs", "outputs"), [(1, (1,)), (7, (5,)), (48, (96, 96)), (100, (36, 12, 12))])
def test_every_shape_equals_one_product_per_row(inputs: int, outputs: tuple[int, ...]) -> None:
    check(RANKS["mixed"], POPULARITY["uniform"], inputs=inputs, outputs=outputs)


def test_low_precision_is_summed_in_float32_and_rounded_once() -> None:
    # 1 + 256 terms of 2^-8 is 2; summed in bfloat16, whose spacing above 1 is 2^-7, each term would vanish.
    ranks = [256]
    a = torch.zeros(256, 4, dtype=torch.bfloat16)
    a[:, 0] = 1
    b = torch.full((256, 3), 2.0**-8, dtype=torch.bfloat16)
    table = RankTable(torch.tensor(ranks, dtype=torch.int32), torch.arange(32, dtype=torch.int32)[None])
    x = torch.tensor([[1.0, 0, 0, 0]], dtype=torch.bfloat16)
    y = torch.ones(1, 3, dtype=torch.bfloat16)
    work, _ = make_work([0], 1)
    sgmv(x, (y,), (Arena(a, b),), (table,), work)
    assert y.tolist() == [[2.0, 2.0, 2.0]]


def test_the_product_with_a_is_not_rounded_between() -> None:
    # x a = 1 + 2^-9 and its 256-fold lie between bfloat16's numbers; only their sum with y is one.
    table = RankTable(torch.tensor([1], dtype=torch.int32), torch.tensor([[0]], dtype=torch.int32))
    arena = Arena(torch.ones(1, 2, dtype=torch.bfloat16), torch.full((1, 1), 256.0, dtype=torch.bfloat16))
    x = torch.tensor([[1.0, 2.0**-9]], dtype=torch.bfloat16)
    y = torch.full((1, 1), -256.0, dtype=torch.bfloat16)
    sgmv(x, (y,), (arena,), (table,), make_work([0], 1)[0])
    assert y.item() == 0.5


def test_rows_of_a_slot_follow_its_pages_in_order() -> None:
    table = RankTable(
        torch.tensor([0, 10], dtype=torch.int32), torch.tensor([[9, 9], [4, 1]], dtype=torch.int32)
    )
    assert table.rows(0).tolist() == []
    assert table.rows(1).tolist() == [32, 33, 34, 35, 36, 37, 38, 39, 8, 9]
