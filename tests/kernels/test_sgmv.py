"""SGMV, the reference and this machine's, against one product per row: ranks, dtypes, popularity, strides."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from sgmv_cases import POPULARITY, RANKS, TOLERANCE, check_sgmv, make_work

from personae.kernels.operators import sgmv
from personae.kernels.registry import reference_only
from personae.kernels.sgmv import RankTable, WeightPool


@pytest.fixture(params=["reference", "this machine's"], autouse=True)
def implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    with reference_only() if request.param == "reference" else nullcontext():
        yield


@pytest.mark.parametrize("popularity", POPULARITY)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_mix_of_ranks_and_adapters_equals_one_product_per_row(ranks: str, popularity: str) -> None:
    check_sgmv(sgmv, RANKS[ranks], POPULARITY[popularity])


@pytest.mark.parametrize("copies", [1, 3, 17])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_dtype_equals_one_product_per_row(dtype: torch.dtype, copies: int) -> None:
    check_sgmv(sgmv, RANKS["mixed"], POPULARITY["with base rows"], copies=copies, dtype=dtype)


@pytest.mark.parametrize(("inputs", "outputs"), [(1, (1,)), (7, (5,)), (48, (96, 96)), (100, (36, 12, 12))])
def test_every_shape_equals_one_product_per_row(inputs: int, outputs: tuple[int, ...]) -> None:
    check_sgmv(sgmv, RANKS["mixed"], POPULARITY["uniform"], inputs=inputs, outputs=outputs)


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
    sgmv(x, (y,), (WeightPool(a, b),), (table,), work)
    assert y.tolist() == [[2.0, 2.0, 2.0]]


def test_the_product_with_a_is_not_rounded_between() -> None:
    # x a = 1 + 2^-9 and its 256-fold lie between bfloat16's numbers; only their sum with y is one.
    table = RankTable(torch.tensor([1], dtype=torch.int32), torch.tensor([[0]], dtype=torch.int32))
    weight_pool = WeightPool(
        torch.ones(1, 2, dtype=torch.bfloat16), torch.full((1, 1), 256.0, dtype=torch.bfloat16)
    )
    x = torch.tensor([[1.0, 2.0**-9]], dtype=torch.bfloat16)
    y = torch.full((1, 1), -256.0, dtype=torch.bfloat16)
    sgmv(x, (y,), (weight_pool,), (table,), make_work([0], 1)[0])
    assert y.item() == 0.5


def test_rows_of_a_slot_follow_its_pages_in_order() -> None:
    table = RankTable(
        torch.tensor([0, 10], dtype=torch.int32), torch.tensor([[9, 9], [4, 1]], dtype=torch.int32)
    )
    assert table.rows(0).tolist() == []
    assert table.rows(1).tolist() == [32, 33, 34, 35, 36, 37, 38, 39, 8, 9]
