"""The products of experts in Triton's interpreter, against the reference."""

import pytest
import torch

from personae.kernels import reference
from personae.kernels.triton import moe as host
from personae.kernels.triton.calls import TritonOperators
from personae.kernels.triton.sizes import Gpu

OURS = TritonOperators(Gpu(1, hopper=True))
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


def case(counts: list[int], outputs: int, inputs: int, dtype: torch.dtype):
    """x as a strided view, its rows grouped by expert."""
    generator = torch.Generator().manual_seed(sum(counts))
    x = torch.randn(sum(counts), inputs + 8, generator=generator).to(dtype)[:, :inputs]
    weight = (torch.randn(len(counts), outputs, inputs, generator=generator) * inputs**-0.5).to(dtype)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    return x, weight, starts


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 32), (130, 72)])
@pytest.mark.parametrize(
    "counts",
    [[1], [0, 2, 0, 0, 1], [17, 0, 16, 15, 1], [40, 70, 3], [0, 0, 5]],
    ids=lambda counts: "-".join(map(str, counts)),
)
def test_each_row_is_multiplied_by_the_weight_of_its_expert(
    counts: list[int], outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    x, weight, starts = case(counts, outputs, inputs, dtype)
    found = OURS.expert_linear(x, weight, starts)
    truth = reference.expert_linear(x.float(), weight.float(), starts)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), truth, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_without_rows_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "expert_linear_kernel", None)
    x, weight, starts = case([0, 0], 16, 16, torch.float32)
    assert OURS.expert_linear(x, weight, starts).shape == (0, 16)
