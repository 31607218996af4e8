"""The Triton kernels between the products, in the interpreter, against the references."""

import pytest
import torch
from torch import Tensor

from personae.kernels import reference, reference_latent
from personae.kernels.triton.calls import TritonOperators
from personae.kernels.triton.sizes import Gpu

OURS = TritonOperators(Gpu(1, hopper=True))
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(ours: Tensor, truth: Tensor) -> None:
    assert ours.dtype == truth.dtype
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours.float(), truth.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (5, 40), (3, 2, 24)])
def test_norms_equal_the_reference(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = noise(*shape[:-1], shape[-1] + 8, dtype=dtype)[..., : shape[-1]]
    weight = noise(shape[-1], dtype=dtype, seed=1)
    close(OURS.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    if len(shape) == 2:
        residual = noise(*shape, dtype=dtype, seed=2)
        kept = residual.clone()
        normed, total = OURS.add_rms_norm(x, residual, weight, 1e-5)
        if dtype is torch.bfloat16:  # the interpreter cuts bits off where a GPU rounds
            close(total, residual + x)
        else:
            assert torch.equal(total, residual + x)
        assert torch.equal(residual, kept)
        close(normed, reference.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "turned"), [(9, 3, 16, 16), (4, 1, 24, 24), (4, 2, 32, 24)]
)
def test_rotary_equals_the_reference_and_leaves_the_rest_alone(
    heads: int, kv_heads: int, dim: int, turned: int, dtype: torch.dtype
) -> None:
    merged = noise(5, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = noise(100, turned // 2, seed=1)
    positions = torch.tensor([0, 3, 99, 4, 3])
    results = []
    for rotary in (OURS.rotary, reference.rotary):
        copy = merged.clone()
        q, k, _ = copy.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
        parts = q.view(5, heads, dim)[..., :turned], k.view(5, kv_heads, dim)[..., :turned]
        rotary(*parts, positions, angles.cos(), angles.sin())
        results.append(copy)
    close(*results)
    kept = torch.ones(heads + 2 * kv_heads, dim, dtype=torch.bool)
    kept[: heads + kv_heads, :turned] = False
    assert torch.equal(results[0][:, kept.flatten()], merged[:, kept.flatten()])


# The interpreter's NumPy warns where exp(-gate) is infinite; so it is on a GPU, and the quotient 0.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gates_equal_the_reference_at_every_magnitude(dtype: torch.dtype, name: str) -> None:
    gate = torch.cat([torch.linspace(-200, 200, 1101), torch.tensor([0.0, 1e-8, -1e-8, 88.0, -88.0, 6e4])])
    x = torch.cat([gate, torch.ones_like(gate)]).repeat(2, 1).to(dtype)
    ours = OURS.by_name()[name](x)
    assert torch.isfinite(ours).all()
    close(ours, getattr(reference, name)(x))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_append_writes_where_it_should_and_nowhere_else(dtype: torch.dtype) -> None:
    caches = [torch.full((6, 3, 8, 16), torch.nan, dtype=dtype) for _ in range(4)]
    merged = noise(5, 3 * 16 * 2 + 7, dtype=dtype)
    k, v = merged[:, :48].view(5, 3, 16), merged[:, 48:96].view(5, 3, 16)
    index = torch.tensor([0, 47, 9, 30, 8])
    OURS.append_kv(k, v, caches[0], caches[1], index)
    reference.append_kv(k, v, caches[2], caches[3], index)
    for ours, truth in zip(caches[:2], caches[2:], strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=0, equal_nan=True)


# Of numbers that FP8 has: the interpreter's rounding loses carries into the exponent, and the least number.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_append_keeps_fp8_and_cuts_off_what_is_too_large(dtype: torch.dtype) -> None:
    caches = [torch.zeros(4, 2, 8, 16, dtype=reference.FP8) for _ in range(4)]
    k, v = (
        (noise(3, 2, 16, seed=seed) * 10.0 ** (2 - seed)).to(reference.FP8).to(dtype).clamp(-448, 448)
        for seed in (0, 4)
    )
    k[0, 0, :3] = torch.tensor([1000.0, -1000.0, 448.0])
    index = torch.tensor([0, 31, 9])
    OURS.append_kv(k, v, caches[0], caches[1], index)
    reference.append_kv(k, v, caches[2], caches[3], index)
    for ours, truth in zip(caches[:2], caches[2:], strict=True):
        assert torch.equal(ours.view(torch.uint8), truth.view(torch.uint8))
    assert caches[0][0, 0, 0, :3].float().tolist() == [448.0, -448.0, 448.0]


def test_what_the_kernels_do_not_take_the_reference_does() -> None:
    x, weight = noise(3, 16).double(), noise(16).double()
    torch.testing.assert_close(OURS.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert torch.equal(OURS.silu_and_mul(x), reference.silu_and_mul(x))
    assert torch.equal(OURS.gelu_and_mul(x), reference.gelu_and_mul(x))


def test_every_operator_of_the_reference_is_there() -> None:
    given = {**vars(reference), **vars(reference_latent)}
    theirs = {name for name in OURS.by_name() if callable(given.get(name))}
    # What the reference does in one call, and a layout of weights, which it does not have.
    assert OURS.by_name().keys() - theirs == {"begin_sgmv", "pack_linear"}
    assert {"sgmv", "paged_attention", "append_kv", "rotary"} <= theirs
