"""Products with weights in few bits in Triton's interpreter, against those with the plain weight."""

import pytest
import torch
import torch.nn.functional as F
from quantized_weights import KINDS, weight_of, whole_blocks

from personae.kernels.decoder import LinearWeights
from personae.kernels.triton import blocks
from personae.kernels.triton import quantized as host
from personae.kernels.triton.blocks import LAYOUTS
from personae.kernels.triton.calls import TritonOperators
from personae.kernels.triton.sizes import Gpu

OURS = TritonOperators(Gpu(1, hopper=True))
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


def case(kind: str, rows: int, outputs: int, inputs: int, dtype: torch.dtype, *, bias: bool):
    """x as a strided view, and the module."""
    inputs = whole_blocks(kind, inputs)
    generator = torch.Generator().manual_seed(rows + outputs)
    x = torch.randn(rows, inputs + 8, generator=generator).to(dtype)[:, :inputs]
    weight = weight_of(kind, outputs, inputs, rows)
    own = torch.randn(outputs, generator=generator).to(dtype) if bias else None
    return x, LinearWeights(weight, own)


ROWS = [(1, 48, 32, True), (16, 33, 200, False), (17, 70, 72, True), (70, 130, 256, False), (3, 5, 7, True)]
CASES = [
    *((kind, *own, dtype) for kind in ("int8", "int4") for own in ROWS for dtype in TOLERANCE),
    *((kind, *own, torch.float16) for kind in LAYOUTS for own in ((5, 33, 200, True), (17, 70, 72, False))),
]


@pytest.mark.parametrize(("kind", "rows", "outputs", "inputs", "bias", "dtype"), CASES)
def test_a_product_is_that_of_the_plain_weight(
    kind: str, rows: int, outputs: int, inputs: int, bias: bool, dtype: torch.dtype
) -> None:
    x, linear = case(kind, rows, outputs, inputs, dtype, bias=bias)
    packed = OURS.pack_linear(linear, dtype)
    assert packed is not None
    found = packed(x)
    truth = F.linear(
        x.float(), linear.weight.plain(dtype).float(), None if linear.bias is None else linear.bias.float()
    )
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), truth, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(packed.plain(), linear.weight.plain(dtype))


@pytest.mark.parametrize("kind", ["int8", "int4", "Q4_K"])
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(kind: str) -> None:
    x, linear = case(kind, 9, 40, 96, torch.float16, bias=True)
    packed = OURS.pack_linear(linear, torch.float16)
    assert packed is not None
    assert torch.equal(packed(x)[4:5], packed(x[4:5]))


@pytest.mark.parametrize("kind", KINDS)
def test_every_stored_number_is_multiplied_exactly(kind: str) -> None:
    """One input at a time: what is read back is the weight itself."""
    weight = weight_of(kind, 24, size := whole_blocks(kind, 64), 3)
    packed = OURS.pack_linear(LinearWeights(weight, None), torch.float32)
    assert packed is not None
    assert torch.equal(packed(torch.eye(size)), weight.plain(torch.float32).T)


def test_a_plain_weight_stays_with_torch() -> None:
    assert OURS.pack_linear(LinearWeights(torch.ones(4, 4), None), torch.float16) is None


@pytest.mark.parametrize("kind", ["int8", "Q4_0"])
def test_without_rows_nothing_is_launched(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "KERNELS", dict.fromkeys(KINDS))
    monkeypatch.setattr(blocks, "block_linear_kernel", None)
    x, linear = case(kind, 0, 16, 16, torch.float32, bias=False)
    packed = OURS.pack_linear(linear, torch.float32)
    assert packed is not None
    assert packed(x).shape == (0, 16)
