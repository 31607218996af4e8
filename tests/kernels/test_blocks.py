"""Products with GGUF's blocks: the bits are those of the weight made bfloat16 before."""

from collections.abc import Iterator

import gguf
import pytest
import torch

from personae.engine.quantization.gguf import METHODS, BlockWeight
from personae.kernels.cpu.build import library
from personae.kernels.cpu.fused import HALVES, CpuLinear, Fused
from personae.kernels.decoder import LinearWeights
from personae.kernels.registry import operators

pytestmark = pytest.mark.skipif(
    "fuse" not in operators("cpu"), reason="no compiler, or no AVX2 on this machine"
)
CPU = torch.device("cpu")
INSTRUCTIONS = ("floats", "pairs", "tiles")  # as instructions.h numbers them


@pytest.fixture(params=[*INSTRUCTIONS, "floats, skylake", "floats, laptop"])
def calls(request: pytest.FixtureRequest) -> Iterator[Fused]:
    name, _, elsewhere = request.param.partition(", ")
    found = request.getfixturevalue(elsewhere) if elsewhere else library()
    before, number = found.personae_instructions(-1), INSTRUCTIONS.index(name)
    if found.personae_instructions(number) != number:
        pytest.skip("not on this machine")
    yield Fused(found)
    found.personae_instructions(before)


def blocks(kind: str, outputs: int, inputs: int) -> BlockWeight:
    """Random ones, of scales over the whole range that a file may have."""
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(outputs, inputs, generator=generator) * torch.logspace(-6, 4, outputs)[:, None]
    weight[1] = 0
    weight[2] += 3  # a least value far from zero
    made = METHODS[kind].kept.empty(outputs, inputs, CPU)
    made.rows.copy_(torch.from_numpy(gguf.quants.quantize(weight.numpy(), made.type)))
    assert made.finite()
    return made


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("shape", [(64, 32), (100, 96), (34, 1184)])
@pytest.mark.parametrize("kind", METHODS)
def test_a_product_has_the_bits_of_bfloat16_for_any_number_of_rows(
    kind: str, shape: tuple[int, int], paired: bool, calls: Fused
) -> None:
    weight, bias = blocks(kind, *shape), torch.randn(shape[0]).bfloat16()
    plain = weight.plain(torch.bfloat16)
    kept, same = (CpuLinear(calls, LinearWeights(one, bias), paired=paired) for one in (weight, plain))
    assert torch.equal(kept.plain(), plain)
    for rows in (1, 2, 8, 9, 32, 33, 130):
        x = torch.randn(rows, shape[1]).bfloat16()
        found = kept(x)
        assert torch.equal(found, same(x))
        truth = x.double() @ plain.double().T + bias.double()
        assert ((found.double() - truth).norm(dim=0) <= 0.01 * truth.norm(dim=0)).all()


@pytest.mark.parametrize("kind", METHODS)
def test_where_float16_is_multiplied_blocks_are_made_plain(kind: str) -> None:
    found = library()
    assert found is not None
    calls, weight = Fused(found), blocks(kind, 64, 64)
    plain = CpuLinear(calls, LinearWeights(weight.plain(torch.bfloat16), None))
    calls.instructions = lambda _: HALVES
    made = CpuLinear(calls, LinearWeights(weight, None))
    x = torch.randn(5, 64).bfloat16()
    assert torch.equal(made(x), plain(x))
    assert torch.equal(made.plain(), weight.plain(torch.bfloat16))
