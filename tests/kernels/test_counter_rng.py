import numpy as np
import pytest
import torch
from slow_sampler import uniform

from personae.kernels.counter_rng import stream, uniforms


def draws(seed: int, count: int, start: int = 0) -> np.ndarray:
    return uniforms(np.full(count, stream(seed)), np.arange(start, start + count))


def test_it_is_splitmix64() -> None:
    # The first outputs of the authors' C program from state 0.
    assert int(stream(0)) == 0xE220A8397B1DCDAF
    bits = uniforms(np.zeros(3, np.uint64), np.arange(3)) * 2.0**53
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert bits.astype(np.uint64).tolist() == [value >> 11 for value in expected]


@pytest.mark.parametrize("seed", [0, 1, 7, -1, 2**63, 2**64 - 1, 2**64 + 5, 123456789])
def test_it_equals_plain_integer_arithmetic(seed: int) -> None:
    assert draws(seed, 50, 2**31 - 20).tolist() == [uniform(seed, 2**31 - 20 + n) for n in range(50)]


def test_wrapping_int64_arithmetic_on_tensors_gives_the_same_bits() -> None:
    def shift(z: torch.Tensor, by: int) -> torch.Tensor:
        return (z >> by) & ((1 << (64 - by)) - 1)

    def signed(value: int) -> int:
        return value - 2**64 if value >= 2**63 else value

    state = torch.full((100,), signed(int(stream(42))))
    z = state + (torch.arange(100) + 1) * signed(0x9E3779B97F4A7C15)
    z = (z ^ shift(z, 30)) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ shift(z, 27)) * signed(0x94D049BB133111EB)
    z = z ^ shift(z, 31)
    assert torch.equal(shift(z, 11).double() * 2.0**-53, torch.from_numpy(draws(42, 100)))


@pytest.mark.parametrize("across", ["positions", "seeds"])
def test_numbers_are_uniform_over_positions_and_over_seeds(across: str) -> None:
    count = 64_000
    if across == "positions":
        values = draws(3, count)
    else:
        values = uniforms(np.array([stream(seed) for seed in range(count)]), np.full(count, 17))
    observed = np.bincount((values * 64).astype(int), minlength=64)
    chi_square = float(((observed - 1000) ** 2 / 1000).sum())
    assert chi_square < 120  # 63 degrees of freedom: exceeded once in 60,000
    assert values.min() >= 0
    assert values.max() < 1


def test_neighbouring_seeds_and_positions_do_not_correlate() -> None:
    count = 40_000
    base = draws(1000, count)
    others = [draws(1001, count), draws(1000, count, 1), draws(1001, count, 1), draws(999, count, 2)]
    for other in others:
        assert abs(np.corrcoef(base, other)[0, 1]) < 4.5 / np.sqrt(count)
    assert not set(base.tolist()) & set(draws(1001, count).tolist())
