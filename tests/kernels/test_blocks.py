"""Products with GGUF's blocks: the file's values times inputs that are rounded to whole numbers."""

import gguf_files
import pytest
import torch

from personae.engine.quantization.gguf import METHODS, BlockWeight
from personae.kernels.cpu.build import library
from personae.kernels.cpu.fused import CpuLinear, Fused
from personae.kernels.decoder import LinearWeights
from personae.kernels.reference import round_inputs
from personae.kernels.registry import operators

pytestmark = pytest.mark.skipif(
    "fuse" not in operators("cpu"), reason="no compiler, or no AVX2 on this machine"
)
CPU = torch.device("cpu")
SHAPES = {kind: [(64, 32), (100, 96), (34, 1184)] for kind in METHODS}
SHAPES |= {kind: [(64, 256), (34, 1280)] for kind in ("Q4_K", "Q5_K", "Q6_K", "IQ4_XS")}


@pytest.fixture(params=["here", "skylake", "laptop"])
def calls(request: pytest.FixtureRequest) -> Fused:
    found = library() if request.param == "here" else request.getfixturevalue(request.param)
    assert found is not None
    return Fused(found)


def blocks(kind: str, outputs: int, inputs: int) -> BlockWeight:
    """Random ones, where they can be of scales over the whole range that a file may have."""
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(outputs, inputs, generator=generator) * torch.logspace(-6, 4, outputs)[:, None]
    weight[1] = 0
    weight[2] += 3  # a least value far from zero
    made = METHODS[kind].kept.empty(outputs, inputs, CPU)
    made.rows.copy_(torch.from_numpy(gguf_files.blocks(weight.numpy(), made.type)).view(outputs, -1))
    assert made.finite()
    return made


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("kind", "shape"), [(kind, shape) for kind in SHAPES for shape in SHAPES[kind]])
def test_a_product_is_that_of_rounded_inputs_with_the_same_bits_for_any_number_of_rows(
    kind: str, shape: tuple[int, int], paired: bool, calls: Fused
) -> None:
    weight, bias = blocks(kind, *shape), torch.randn(shape[0]).bfloat16()
    kept = CpuLinear(calls, LinearWeights(weight, bias), paired=paired)
    assert torch.equal(kept.plain(), weight.plain(torch.bfloat16))
    x = torch.randn(130, shape[1]).bfloat16()
    found = kept(x)
    for rows in (1, 2, 5, 8, 9, 32, 33):
        assert torch.equal(kept(x[:rows]), found[:rows])
        assert torch.equal(kept(x[-rows:]), found[-rows:])
    truth = round_inputs(x).double() @ weight.plain(torch.float32).double().T + bias.double()
    assert ((found.double() - truth).norm(dim=0) <= 0.004 * truth.norm(dim=0)).all()  # an answer is bfloat16


@pytest.mark.parametrize("kind", SHAPES)
def test_what_is_not_finite_stays_so_and_does_not_spread_to_other_rows(kind: str, calls: Fused) -> None:
    kept = CpuLinear(calls, LinearWeights(blocks(kind, *SHAPES[kind][-1]), None))
    x = torch.randn(4, SHAPES[kind][-1][1]).bfloat16()
    whole = kept(x)
    x[1, 40], x[2, 7] = torch.nan, torch.inf
    found = kept(x)
    assert torch.equal(found[[0, 3]], whole[[0, 3]])
    assert not found[1:3].isfinite().any()


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-30, 1e-20, 1e20, 1e30])
def test_inputs_of_any_size_are_multiplied(size: float, calls: Fused) -> None:
    weight = METHODS["Q8_0"].kept.empty(32, 64, CPU)
    plain = torch.randn(32, 64)
    weight.rows.copy_(torch.from_numpy(gguf_files.blocks(plain.numpy(), weight.type)))
    x = (torch.randn(3, 64) * size).bfloat16()
    truth = round_inputs(x).double() @ weight.plain(torch.float64).T
    assert torch.allclose(CpuLinear(calls, LinearWeights(weight, None))(x).double(), truth, 0.01, size * 0.01)
