"""Weights as int8: each is the nearest of 255 steps of its row."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from personae.kernels.int8 import STEPS, Int8Weight

CPU = torch.device("cpu")


def kept(weight: torch.Tensor) -> Int8Weight:
    found = Int8Weight.empty(*weight.shape, CPU)
    found.copy_(weight)
    return found


@given(arrays("float32", (3, 7), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_no_weight_is_more_than_half_a_step_away(values) -> None:
    weight = torch.from_numpy(values)
    found = kept(weight)
    step = weight.double().abs().amax(1, keepdim=True) / STEPS
    assert ((found.values * found.scales.double() - weight).abs() <= step * 0.5001 + 1e-38).all()
    assert found.values.abs().max() <= STEPS


def test_a_row_of_zeros_stays_one() -> None:
    weight = torch.randn(4, 8)
    weight[2] = 0
    plain = kept(weight).plain(torch.float32)
    assert plain[2].tolist() == [0.0] * 8
    assert plain.isfinite().all()


def test_how_a_weight_is_cut_while_it_is_converted_does_not_show(monkeypatch) -> None:
    weight = torch.randn(50, 64).bfloat16()
    whole = kept(weight)
    monkeypatch.setattr("personae.kernels.int8._CHUNK", 200)
    parts = kept(weight)
    assert torch.equal(whole.values, parts.values)
    assert torch.equal(whole.scales, parts.scales)
    assert torch.equal(whole.plain(torch.float16), parts.plain(torch.float16))


def test_merged_modules_are_filled_one_by_one() -> None:
    weight = torch.randn(12, 8)
    merged = Int8Weight.empty(12, 8, CPU)
    for part, own in zip(merged.split([4, 8]), weight.split([4, 8]), strict=True):
        part.copy_(own)
    assert torch.equal(merged.plain(torch.float32), kept(weight).plain(torch.float32))
