"""The Triton SGMV in the interpreter, over ranks, popularity, dtypes, shapes, and graphs' fixed lists."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from sgmv_cases import POPULARITY, RANKS, check_sgmv, make_module, make_work

from personae.kernels import reference
from personae.kernels.sgmv import WorkList
from personae.kernels.triton import sgmv as host
from personae.kernels.triton.calls import TritonOperators
from personae.kernels.triton.device import sgmv_expand, sgmv_shrink
from personae.kernels.triton.sizes import Gpu

sgmv = partial(host.sgmv, gpu=Gpu(1, hopper=False))
NARROW = {"inputs": 24, "outputs": (24, 8)}


@pytest.mark.parametrize(
    ("ranks", "popularity"),
    [("mixed", popularity) for popularity in POPULARITY]
    + [(ranks, popularity) for ranks in RANKS for popularity in ("skewed", "with base rows")],
)
def test_every_mix_of_ranks_and_adapters_equals_one_product_per_row(ranks: str, popularity: str) -> None:
    check_sgmv(sgmv, RANKS[ranks], POPULARITY[popularity], **NARROW)


# Triton's interpreter does not multiply bfloat16 tiles rightly; rows one by one it does.
@pytest.mark.parametrize(
    ("dtype", "copies"),
    [
        (torch.float32, 3),
        (torch.float32, 18),
        (torch.float16, 1),
        (torch.float16, 18),
        (torch.bfloat16, 1),
        (torch.bfloat16, 2),
    ],
    ids=str,
)
def test_every_dtype_equals_one_product_per_row(dtype: torch.dtype, copies: int) -> None:
    check_sgmv(sgmv, RANKS["mixed"], POPULARITY["with base rows"], copies=copies, dtype=dtype, **NARROW)


@pytest.mark.parametrize(
    ("inputs", "outputs"), [(1, (1,)), (7, (5,)), (48, (264, 16)), (1100, (36, 12, 12)), (2100, (8,))]
)
@pytest.mark.parametrize("copies", [1, 6])
def test_every_shape_equals_one_product_per_row(inputs: int, outputs: tuple[int, ...], copies: int) -> None:
    check_sgmv(sgmv, RANKS["mixed"], POPULARITY["distinct"], copies=copies, inputs=inputs, outputs=outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_prefill_takes_large_tiles_and_equals_one_product_per_row(dtype: torch.dtype) -> None:
    check_sgmv(sgmv, [0, 1, 13, 70], [3] * 70 + [None, 2, 2, 1, 0] + [1] * 6, inputs=1030, dtype=dtype)


def test_the_tensor_cores_keep_more_of_the_shrunk_rows_than_half_precision_holds() -> None:
    # s = 1 + 2^-12 is not a float16; rounded to one, the small part would be lost under the base of -1.
    module = make_module([8], 8, 8, torch.float16, seed=0)
    module.weight_pool.a[~module.weight_pool.a.isnan()] = 0
    module.weight_pool.b[~module.weight_pool.b.isnan()] = 0
    row = module.table.rows(0)[0]
    module.weight_pool.a[row, :2] = torch.tensor([1, 2.0**-12], dtype=torch.float16)
    module.weight_pool.b[row] = 1
    y = torch.full((6, 8), -1, dtype=torch.float16)
    x = torch.ones(6, 8, dtype=torch.float16)
    sgmv(x, (y,), (module.weight_pool,), (module.table,), make_work([0], 6)[0])
    assert torch.equal(y, torch.full_like(y, 2.0**-12))


def test_the_plan_is_made_once_for_all_layers_of_a_step() -> None:
    work, _ = make_work([0, 1], 2)
    x = torch.randn(4, 16)
    tables = None
    for layer in range(3):
        module = make_module([8, 3], 16, 8, torch.float32, seed=layer)
        tables = tables or (module.table,)
        sgmv(x, (torch.zeros(4, 8),), (module.weight_pool,), tables, work)
    assert sum(isinstance(plan, host.SgmvPlan) for plan in work.plans.values()) == 1


def test_a_captured_list_of_fixed_length_serves_more_and_fewer_adapters_than_it_has_segments() -> None:
    # What a graph replays: the same tensors, refilled; a segment of no rows is skipped.
    module = make_module([8, 16, 3, 1], 16, 24, torch.float32, seed=0)
    work = WorkList(*(torch.zeros(6, dtype=torch.int32) for _ in range(3)))
    x = torch.randn(6, 16)
    for adapters in ([0, 1, 2, 3, 0, 1], [2, None, None], [None], [1, 1, 1, 1, 1, 1]):
        live, _ = make_work(adapters, 1)
        for own, new in zip(
            (work.first_row, work.rows, work.adapter), (live.first_row, live.rows, live.adapter), strict=True
        ):
            own.zero_()
            own[: len(new)] = new
        ours, truth = torch.ones(2, 6, 24)
        sgmv(x, (ours,), (module.weight_pool,), (module.table,), replace(work, plans={}))
        reference.sgmv(x, (truth,), (module.weight_pool,), (module.table,), live)
        torch.testing.assert_close(ours, truth)


class Order:
    """A branch that notes when it is forked and joined."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    @contextmanager
    def fork(self) -> Iterator[None]:
        self.noted.append("fork")
        yield

    def join(self) -> None:
        self.noted.append("join")


@pytest.mark.parametrize("popularity", ["with base rows", "skewed"])
def test_begun_before_ys_are_there_it_equals_one_product_per_row(popularity: str) -> None:
    def halves(x, ys, weight_pools, tables, work):  # type: ignore[no-untyped-def]  # as `sgmv`
        later = [y.clone() for y in ys]
        for y in ys:
            y.fill_(torch.nan)
        order = Order()
        finish = host.begin_sgmv(x, weight_pools, tables, work, order, Gpu(1, hopper=False))
        assert order.noted == ["fork"]
        for y, value in zip(ys, later, strict=True):
            y.copy_(value)
        finish(ys)
        assert order.noted == ["fork", "join"]

    check_sgmv(halves, RANKS["mixed"], POPULARITY[popularity], **NARROW)


def test_begun_on_a_branch_it_has_the_same_bits() -> None:
    # A sequence's steps are graphs or not, as its company has it.
    module = make_module([16, 8], 600, 40, torch.float32, seed=0)
    x, ours = torch.randn(7, 600), torch.randn(7, 40)
    begun = ours.clone()
    given = (module.weight_pool,), (module.table,), make_work([0, 1, None, 1, 0, 0, 0], 1)[0]
    sgmv(x, (ours,), *given)
    host.begin_sgmv(x, *given, Order(), Gpu(1, hopper=False))((begun,))
    assert torch.equal(begun, ours)


def test_what_the_kernels_do_not_take_the_reference_does() -> None:
    check_sgmv(
        TritonOperators(Gpu(1, hopper=False)).sgmv, RANKS["mixed"], POPULARITY["uniform"], dtype=torch.float64
    )


def test_a_rows_bits_do_not_depend_on_its_company() -> None:
    module = make_module([16, 8], 600, 40, torch.float32, seed=0)
    x, y = torch.randn(9, 600), torch.randn(9, 40)
    together, alone = y.clone(), y.clone()
    sgmv(
        x,
        (together,),
        (module.weight_pool,),
        (module.table,),
        make_work([0, 1, 1, 0, 0, None, 1, 0, 1], 1)[0],
    )
    for row, adapter in enumerate([0, 1, 1, 0, 0, None, 1, 0, 1]):
        part = alone[row : row + 1]
        sgmv(x[row : row + 1], (part,), (module.weight_pool,), (module.table,), make_work([adapter], 1)[0])
    assert torch.equal(together, alone)


@dataclass(eq=False)
class LateShrink:
    """Shrink whose sums are NaN until somebody waits for them."""

    kernel: object
    waits: int = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: object, **options: object) -> None:
            self.kernel[grid](*args, **options)
            self.planes = args[4]
            self.sums = self.planes.clone()
            self.planes.fill_(torch.nan)

        return launch

    def wait(self) -> None:
        self.waits += 1
        self.planes.copy_(self.sums)


@pytest.mark.parametrize("rows", [1, 6], ids=["row by row", "tiles"])
def test_an_expand_that_begins_early_waits_for_shrink_before_it_reads_its_sums(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = LateShrink(host.shrink_kernel)
    monkeypatch.setattr(host, "shrink_kernel", late)
    monkeypatch.setattr(sgmv_shrink, "gdc_launch_dependents", lambda: None)
    monkeypatch.setattr(sgmv_expand, "gdc_wait", late.wait)
    module = make_module([16, 8], 24, 40, torch.float32, seed=0)
    work, _ = make_work([0, 1], rows)
    x = torch.randn(2 * rows, 24)
    ours, truth = torch.ones(2, 2 * rows, 40)
    host.sgmv(x, (ours,), (module.weight_pool,), (module.table,), work, Gpu(1, hopper=True))
    reference.sgmv(x, (truth,), (module.weight_pool,), (module.table,), work)
    torch.testing.assert_close(ours, truth)
    assert late.waits >= host.PROGRAMS, "what follows may find a shrink that is not done"
