"""Products with weights in 8 and 4 bits in Triton's interpreter, against those with the plain weight."""

import pytest
import torch
import torch.nn.functional as F

from personae.engine.quantization.int4 import Int4Weight
from personae.engine.quantization.int8 import Int8Weight
from personae.kernels.decoder import LinearWeights
from personae.kernels.triton import quantized as host
from personae.kernels.triton.calls import TritonOperators
from personae.kernels.triton.sizes import Gpu

OURS = TritonOperators(Gpu(1, hopper=True))
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
KINDS = {"int8": Int8Weight, "int4": Int4Weight}


def case(kind: str, rows: int, outputs: int, inputs: int, dtype: torch.dtype, *, bias: bool):
    """x as a strided view, and the module."""
    generator = torch.Generator().manual_seed(rows + outputs)
    x = torch.randn(rows, inputs + 8, generator=generator).to(dtype)[:, :inputs]
    weight = KINDS[kind].empty(outputs, inputs, torch.device("cpu"))
    weight.copy_(torch.randn(outputs, inputs, generator=generator) * inputs**-0.5)
    own = torch.randn(outputs, generator=generator).to(dtype) if bias else None
    return x, LinearWeights(weight, own)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "bias"),
    [(1, 48, 32, True), (16, 33, 200, False), (17, 70, 72, True), (70, 130, 256, False), (3, 5, 7, True)],
)
def test_a_product_is_that_of_the_plain_weight(
    kind: str, rows: int, outputs: int, inputs: int, bias: bool, dtype: torch.dtype
) -> None:
    x, linear = case(kind, rows, outputs, inputs, dtype, bias=bias)
    packed = OURS.pack_linear(linear, dtype)
    assert packed is not None
    found = packed(x)
    truth = F.linear(
        x.float(), linear.weight.plain(torch.float32), None if linear.bias is None else linear.bias.float()
    )
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), truth, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(packed.plain(), linear.weight.plain(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(kind: str) -> None:
    x, linear = case(kind, 9, 40, 96, torch.float16, bias=True)
    packed = OURS.pack_linear(linear, torch.float16)
    assert packed is not None
    assert torch.equal(packed(x)[4:5], packed(x[4:5]))


@pytest.mark.parametrize("kind", KINDS)
def test_every_stored_number_is_multiplied_exactly(kind: str) -> None:
    """One input at a time: what is read back is the weight itself."""
    weight = KINDS[kind].empty(24, 64, torch.device("cpu"))
    weight.copy_(torch.linspace(-1, 1, 24 * 64).view(24, 64))
    packed = OURS.pack_linear(LinearWeights(weight, None), torch.float32)
    assert packed is not None
    assert torch.equal(packed(torch.eye(64)), weight.plain(torch.float32).T)


def test_a_plain_weight_stays_with_torch() -> None:
    assert OURS.pack_linear(LinearWeights(torch.ones(4, 4), None), torch.float16) is None


def test_without_rows_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "KERNELS", dict.fromkeys(KINDS))
    x, linear = case("int8", 0, 16, 16, torch.float32, bias=False)
    packed = OURS.pack_linear(linear, torch.float32)
    assert packed is not None
    assert packed(x).shape == (0, 16)
