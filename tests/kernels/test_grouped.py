"""Products of groups of rows with a weight each, in one call: the bits are those of each weight's own
product."""

import pytest
import torch

from personae.engine.quantization.int4 import Int4Weight
from personae.engine.quantization.int8 import Int8Weight
from personae.kernels.cpu import operators
from personae.kernels.decoder import LinearWeights, PackedLinear, Weight, grouped_linear, pack_linear

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    "fuse" not in operators(), reason="no compiler, or no AVX-512 on this machine"
)


def packed(kind: str, outputs: int, inputs: int, count: int) -> list[PackedLinear]:
    generator = torch.Generator().manual_seed(outputs)
    found = []
    for _ in range(count):
        plain = torch.randn(outputs, inputs, generator=generator)
        weight: Weight = plain.bfloat16()
        if kind != "bfloat16":
            weight = (Int8Weight if kind == "int8" else Int4Weight).empty(outputs, inputs, CPU)
            weight.copy_(plain)
        one = pack_linear(LinearWeights(weight, None), torch.bfloat16)
        assert one is not None
        found.append(one)
    return found


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (34, 1184), (2112, 96)])
@pytest.mark.parametrize(
    "counts", [[1], [0, 3, 0, 1], [40, 0, 1, 130, 2], [0, 0], [1] * 40], ids=lambda counts: str(len(counts))
)
@pytest.mark.parametrize("threads", [1, 2])
def test_all_groups_in_one_call_have_the_bits_of_one_by_one(
    kind: str, outputs: int, inputs: int, counts: list[int], threads: int
) -> None:
    grouped = grouped_linear(CPU, torch.bfloat16)
    assert grouped is not None
    weights = packed(kind, outputs, inputs, len(counts))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.randn(sum(counts), inputs + 8).bfloat16()[:, :inputs]
        found = grouped(x, weights, counts)
        parts = zip(weights, x.split(counts), strict=True)
        truth = torch.cat([weight(part) for weight, part in parts if len(part)] or [found])
    finally:
        torch.set_num_threads(before)
    assert found.shape == (sum(counts), outputs)
    assert torch.equal(found, truth)


def test_float32_has_no_such_call() -> None:
    assert grouped_linear(CPU, torch.float32) is None
