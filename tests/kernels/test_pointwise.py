"""Norms, rotation and activation: the references against formulas written another way, in float64."""

import pytest
import torch
from torch import Tensor

from personae.kernels.operators import add_rms_norm, gelu_and_mul, rms_norm, rotary, silu_and_mul
from personae.kernels.registry import reference_only

DTYPES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def _reference():
    with reference_only():
        yield


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 64), (5, 3, 64)])
def test_rms_norm_has_unit_mean_square_before_the_weight(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = (3 * noise(*shape)).to(dtype), noise(64, seed=1).to(dtype)
    found = rms_norm(x, weight, 1e-5)
    wide = x.double()
    expected = wide / (wide.norm(dim=-1, keepdim=True) ** 2 / 64 + 1e-5) ** 0.5 * weight.double()
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=DTYPES[dtype], rtol=DTYPES[dtype])


def test_rms_norm_keeps_its_precision_where_squares_would_overflow_float16() -> None:
    x = torch.full((1, 64), 1000.0, dtype=torch.float16)
    assert torch.equal(rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-5), torch.ones_like(x))


def test_rms_norm_takes_strided_heads() -> None:
    heads = noise(4, 10 * 16)[:, 32:96].view(4, 4, 16)
    weight = noise(16, seed=1)
    assert torch.equal(rms_norm(heads, weight, 1e-6), rms_norm(heads.contiguous(), weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_returns_the_norm_of_the_sum_and_the_sum(dtype: torch.dtype) -> None:
    x, residual, weight = (noise(6, 64, seed=seed).to(dtype) for seed in (0, 1, 2))
    kept = x.clone(), residual.clone()
    normed, total = add_rms_norm(x, residual, weight[0], 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight[0], 1e-6))
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_turns_each_pair_by_its_angle_in_place(dtype: torch.dtype) -> None:
    merged = noise(5, (4 + 2 + 2) * 16).to(dtype)  # q, k and v of a merged output
    before = merged.clone()
    q, k = merged[:, :64].view(5, 4, 16), merged[:, 64:96].view(5, 2, 16)
    positions = torch.tensor([0, 3, 99, 4, 3])
    angles = torch.outer(torch.arange(100.0), 100.0 ** -torch.linspace(0, 1, 8))
    rotary(q, k, positions, angles.cos(), angles.sin())
    heads = before[:, :96].view(5, 6, 2, 8).double()
    turned = torch.complex(heads[:, :, 0], heads[:, :, 1]) * torch.polar(
        torch.ones(5, 1, 8, dtype=torch.double), angles[positions].unsqueeze(1).double()
    )
    expected = torch.cat((turned.real, turned.imag), dim=-1).view(5, 96)
    torch.testing.assert_close(merged[:, :96].double(), expected, atol=2 * DTYPES[dtype], rtol=DTYPES[dtype])
    assert torch.equal(merged[:, 96:], before[:, 96:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_and_mul_is_torch_s_own_with_tanh(dtype: torch.dtype) -> None:
    x = (4 * noise(6, 40)).to(dtype)
    gate, up = x.double().split(20, dim=-1)
    truth = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(gelu_and_mul(x).double(), truth, atol=2 * DTYPES[dtype], rtol=DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_gates_the_second_half_with_the_first(dtype: torch.dtype) -> None:
    x = (4 * noise(6, 40)).to(dtype)
    gate, up = x.double().split(20, dim=-1)
    found = silu_and_mul(x)
    assert found.shape == (6, 20)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), gate / (1 + (-gate).exp()) * up, atol=DTYPES[dtype], rtol=DTYPES[dtype]
    )
