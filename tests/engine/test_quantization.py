"""Weights in few bits: what is kept, and that it is near enough."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from personae.engine.quantization import QUANTIZATIONS, scheme_of
from personae.engine.quantization.int4 import GROUP, Int4Weight
from personae.engine.quantization.int8 import STEPS, Int8Weight
from personae.engine.quantization.scaled import ScaledWeight
from personae.evals.bench.gpu import shapes

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)


def kept(weight: torch.Tensor, quantization: str) -> ScaledWeight:
    found = scheme_of(quantization)(["a"]).kept.empty(*weight.shape, CPU)
    found.copy_(weight)
    return found


def in_int8(weight: torch.Tensor) -> Int8Weight:
    found = kept(weight, "int8")
    assert isinstance(found, Int8Weight)
    return found


def in_int4(weight: torch.Tensor) -> Int4Weight:
    found = kept(weight, "int4")
    assert isinstance(found, Int4Weight)
    return found


def steps_of(found: Int4Weight) -> torch.Tensor:
    """[outputs, groups] float64, from what the codes are said to mean."""
    codes = found.steps.int()
    return (1 - 2 * (codes >> 7)) * 2.0 ** ((codes >> 4 & 7) - 7).double() * (1 + (codes & 15) / 16)


def levels_of(found: Int4Weight) -> torch.Tensor:
    """[outputs, groups, 16], the same."""
    both = found.levels.to(torch.uint8).int()
    levels = torch.stack((both & 15, both >> 4), 2).view(*found.steps.shape, GROUP)
    return torch.where(levels < 8, levels, levels - 16)


@given(arrays("float32", (3, 7), elements=FLOATS))
def test_no_weight_in_int8_is_more_than_half_a_step_away(values) -> None:
    weight = torch.from_numpy(values)
    found = in_int8(weight)
    step = weight.double().abs().amax(1, keepdim=True) / STEPS
    assert ((found.values * found.scales.double() - weight).abs() <= step * 0.5001 + 1e-38).all()
    assert found.values.abs().max() <= STEPS


@given(arrays("float32", (3, 2 * GROUP), elements=FLOATS))
def test_no_group_in_int4_is_further_away_than_half_steps_of_its_largest_weight(values) -> None:
    weight = torch.from_numpy(values)
    groups = weight.double().view(3, 2, GROUP)
    found = in_int4(weight).plain(torch.float64).double().view(3, 2, GROUP)
    largest = groups.abs().amax(2)
    step = torch.maximum(largest / 8, largest.amax(1, keepdim=True) / 8 / 128) * (1 + 1 / 32)
    assert ((found - groups).square().sum(2) <= GROUP * (step / 2) ** 2 * 1.001 + 1e-37**2).all()


def test_a_step_for_int4_is_chosen_almost_as_well_as_by_trying_all() -> None:
    weight = torch.randn(40, 10 * GROUP, generator=torch.Generator().manual_seed(0)).double()
    groups = (weight / (weight.abs().amax(1, keepdim=True) / 8)).view(40, 10, GROUP)
    all_steps = torch.tensor([2.0 ** (code // 16 - 7) * (1 + code % 16 / 16) for code in range(128)])
    least = torch.full((40, 10), torch.inf, dtype=torch.float64)
    for step in torch.cat([all_steps, -all_steps]).double():
        errors = ((groups / step).round().clamp(-8, 7) * step - groups).square().sum(2)
        least = torch.minimum(least, errors)
    found = in_int4(weight)
    errors = (steps_of(found).unsqueeze(2) * levels_of(found) - groups).square().sum(2)
    assert (errors >= least * 0.999).all()
    assert errors.sum() < 1.1 * least.sum()


def test_int4_is_nearer_than_one_step_of_16_bits_for_32_weights() -> None:
    """That is GGUF's Q4_0, which has as many bits."""
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    groups = weight.view(-1, 32)
    step = groups.gather(1, groups.abs().argmax(1, keepdim=True)).div(-8).half().float()
    other = ((groups / step).round().clamp(-8, 7) * step).view_as(weight)
    found = in_int4(weight)
    assert sum(tensor.nbytes for tensor in (found.levels, found.steps)) * 8 == 4.5 * weight.numel()
    assert (found.plain(torch.float32) - weight).norm() < 0.85 * (other - weight).norm()


def test_what_int4_keeps_is_a_level_times_a_step_times_a_scale_and_the_former_is_bfloat16() -> None:
    weight = torch.randn(9, 70)
    found = in_int4(weight)
    product = (steps_of(found).unsqueeze(2) * levels_of(found)).view(9, -1)[:, :70]
    assert torch.equal(found.plain(torch.float32), product.float() * found.scales)
    assert torch.equal(product.bfloat16().double(), product)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("inputs", [1, 8, GROUP, GROUP + 1])
def test_a_row_of_zeros_stays_one(inputs: int, quantization: str) -> None:
    weight = torch.randn(4, inputs)
    weight[2] = 0
    plain = kept(weight, quantization).plain(torch.float32)
    assert plain[2].tolist() == [0.0] * inputs
    assert plain.isfinite().all()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_value_that_is_not_finite_shows_in_its_rows_scale(quantization: str, value: float) -> None:
    weight = torch.randn(4, 40)
    weight[2, 20] = value
    assert kept(weight, quantization).scales.isfinite().flatten().tolist() == [True, True, False, True]


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_how_a_weight_is_cut_while_it_is_converted_does_not_show(
    quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(50, 64).bfloat16()
    whole = kept(weight, quantization)
    monkeypatch.setattr("personae.kernels.quantized._CHUNK", 200)
    parts = kept(weight, quantization)
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(whole.plain(dtype), parts.plain(dtype))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_weight_that_is_stored_with_its_inputs_first_is_the_same(quantization: str) -> None:
    weight = torch.randn(32, 64)
    turned = weight.T.contiguous().T
    assert torch.equal(
        kept(turned, quantization).plain(torch.float32), kept(weight, quantization).plain(torch.float32)
    )


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_merged_modules_are_filled_one_by_one(quantization: str) -> None:
    weight = torch.randn(12, 8)
    merged = scheme_of(quantization)(["a"]).kept.empty(12, 8, CPU)
    for part, own in zip(merged.split([4, 8]), weight.split([4, 8]), strict=True):
        part.copy_(own)
    assert torch.equal(merged.plain(torch.float32), kept(weight, quantization).plain(torch.float32))


@pytest.mark.parametrize(("name", "kept"), [("int8", Int8Weight), ("int4", Int4Weight), ("bfloat16", None)])
def test_the_memory_of_an_8b_model_that_the_docs_give_is_that_of_its_tensors(name: str, kept: Any) -> None:
    meta = torch.device("meta")

    def octets(kind: Any, outputs: int, inputs: int) -> tuple[int, int]:
        """Of the weight, and of its scales."""
        if kind is None:
            return 2 * outputs * inputs, 0
        weight = kind.empty(outputs, inputs, meta)
        return weight.nbytes - weight.scales.nbytes, weight.scales.nbytes

    modules = [octets(kept, sum(outputs), inputs) for inputs, outputs in shapes.GROUPS.values()]
    layers = shapes.LAYERS * sum(size for size, _ in modules)
    scales = shapes.LAYERS * sum(size for _, size in modules)
    output, of_output = octets(kept and Int8Weight, shapes.VOCAB, shapes.HIDDEN)
    embedding = 2 * shapes.VOCAB * shapes.HIDDEN
    figures = [f"{size / 1e9:.2f} GB" for size in (layers, output, embedding, layers + output + embedding)]
    text = (ROOT / "docs/internals/kernels_gpu.md").read_text(encoding="utf-8")
    assert f"| {name} | {' | '.join(figures)} |" in text
    assert kept is None or f"({(scales + of_output) / 1e6:.0f} MB)" in text
