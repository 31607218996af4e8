"""One thread's answers are torch's."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from personae.lora.single import from_float8, magnitude, transposed

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(st.lists(st.floats(width=16, allow_nan=False), min_size=1))
def test_the_magnitude_is_the_largest_absolute_value(dtype: torch.dtype, values: list[float]) -> None:
    tensor = torch.tensor(values).to(dtype)
    assert magnitude(tensor) == float(tensor.abs().max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_no_number_shows(dtype: torch.dtype) -> None:
    for odd in (math.nan, -math.nan):
        assert math.isnan(magnitude(torch.tensor([1.0, odd, math.inf]).to(dtype)))
    assert magnitude(torch.tensor([1.0, -math.inf]).to(dtype)) == math.inf


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_transposed_matrix_is_contiguous_and_the_same(dtype: torch.dtype) -> None:
    matrix = torch.randn(5, 7).to(dtype)
    assert torch.equal(transposed(matrix), matrix.T)
    assert transposed(matrix).is_contiguous()
    assert torch.equal(transposed(matrix.T), matrix)


def test_float8_is_looked_up_as_torch_converts_it() -> None:
    every = bytearray(range(256))
    expected = torch.frombuffer(every, dtype=torch.float8_e4m3fn).bfloat16()
    assert torch.equal(from_float8(every).view(torch.int16), expected.view(torch.int16))
