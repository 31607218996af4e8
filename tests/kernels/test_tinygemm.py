"""Weights of four bits in torch's own kernel: its kernel of CPUs stands for that of GPUs."""

from typing import Any

import gguf_files
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from personae.engine.quantization.gguf import METHODS, BlockWeight
from personae.kernels import registry, tinygemm
from personae.kernels.decoder import LinearWeights
from personae.kernels.registry import Implementation, optional, override
from personae.kernels.tinygemm import linear
from personae.kernels.tinygemm.linear import PACK, TinyGemmLinear, pack_linear

CUDA = torch.device("cuda")
ATEN = torch.ops.aten


def weight_of(
    outputs: int, inputs: int, *, group: int = 32, exact: bool = True, device: str = "cpu"
) -> BlockWeight:
    """Random levels; `group` inputs share a scale, which has eight significant bits if it is `exact`."""
    generator = torch.Generator().manual_seed(inputs + group)
    scales = torch.rand(outputs, inputs // group, generator=generator).add(0.5).mul(0.01)
    scales = (scales.bfloat16() if exact else scales).half().repeat_interleave(group // 32, 1)
    levels = torch.randint(0, 256, (outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
    rows = torch.cat((scales.unsqueeze(2).view(torch.uint8), levels), 2).view(outputs, -1)
    weight = METHODS["Q4_0"].kept.empty(outputs, inputs, torch.device(device))
    weight.rows.copy_(rows)
    return weight


def on_paper(operator: Any, *args: Any) -> torch.Size:
    """The shape that torch's own checks of the operator give for tensors like these on a GPU."""
    with FakeTensorMode():
        return operator(
            *(
                torch.empty(each.shape, dtype=each.dtype, device="cuda") if isinstance(each, Tensor) else each
                for each in args
            )
        ).shape


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of groups with which the kernel is called."""
    groups: list[int] = []

    def convert(packed: Tensor, tiles: int) -> Tensor:
        outputs, half = packed.shape
        assert on_paper(PACK, packed, tiles) == (outputs // 8, half // (8 * tiles), 32, tiles // 2)
        levels = torch.stack((packed >> 4, packed & 15), 2).view(outputs, -1).int()
        found: Tensor = ATEN._convert_weight_to_int4pack_for_cpu(levels, tiles)
        return found

    def multiply(x: Tensor, packed: Tensor, group: int, scales: Tensor) -> Tensor:
        assert x.is_contiguous()
        assert (x.dtype, scales.dtype) == (torch.bfloat16, torch.bfloat16)
        assert scales.is_contiguous()
        groups.append(group)
        found: Tensor = ATEN._weight_int4pack_mm_for_cpu(x, packed, group, scales)
        return found

    monkeypatch.setattr(linear, "PACK", convert)
    monkeypatch.setattr(linear, "MULTIPLY", multiply)
    return groups


def refused(linear: LinearWeights, dtype: torch.dtype) -> None:
    """Stands for Triton's kernels."""


@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 256), (48, 1280)])
def test_a_product_has_the_files_values_and_the_largest_groups(
    outputs: int, inputs: int, group: int, kernel: list[int]
) -> None:
    weight, bias = weight_of(outputs, inputs, group=group), torch.randn(outputs).bfloat16()
    plain = weight.plain(torch.bfloat16)
    product = pack_linear(LinearWeights(weight, bias), torch.bfloat16, refused)
    assert isinstance(product, TinyGemmLinear)
    assert product.plain().equal(plain)
    for rows in (1, 5, 70):
        x = torch.randn(rows, 2 * inputs).bfloat16()[:, :inputs]  # a row may be strided
        found, truth = product(x), F.linear(x.double(), plain.double(), bias.double())
        assert (found - truth).norm() <= 0.004 * truth.norm()  # an answer is bfloat16
    assert product(torch.empty(0, inputs).bfloat16()).shape == (0, outputs)
    assert set(kernel) == {group}


@pytest.mark.parametrize(
    "weight",
    [
        weight_of(64, 256, exact=False),
        weight_of(60, 256),  # not in eights
        METHODS["Q8_0"].kept.empty(64, 256, torch.device("cpu")),
        torch.zeros(64, 256),
    ],
)
def test_what_the_kernel_would_round_or_does_not_take_goes_to_the_other_kernels(weight: Any) -> None:
    asked: list[LinearWeights] = []
    given = LinearWeights(weight, None)
    assert pack_linear(given, torch.bfloat16, lambda passed, _dtype: asked.append(passed)) is None
    assert len(asked) == 1
    assert asked[0] is given


def test_inputs_in_sixty_fours_and_thirty_twos_are_packed_in_fewer_tiles(kernel: list[int]) -> None:
    for inputs in (96, 192):
        weight = weight_of(16, inputs)
        product = pack_linear(LinearWeights(weight, None), torch.bfloat16, refused)
        assert isinstance(product, TinyGemmLinear)
        assert product.plain().equal(weight.plain(torch.bfloat16))


def test_gguf_files_whose_scales_have_more_bits_are_not_rounded() -> None:
    weight = METHODS["Q4_0"].kept.empty(16, 64, torch.device("cpu"))
    values = torch.randn(16, 64).numpy()
    weight.rows.copy_(torch.from_numpy(gguf_files.blocks(values, weight.type)).view(16, -1))
    assert pack_linear(LinearWeights(weight, None), torch.bfloat16, refused) is None


def test_a_gpu_has_it_in_bfloat16_and_an_override_has_tritons_kernels_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = Implementation(refused, frozenset({torch.bfloat16, torch.float16}), (8, 0))
    found = {"triton": {"pack_linear": theirs}}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr(
        registry,
        "operators",
        lambda backend: tinygemm.operators() if backend == "tinygemm" else found.get(backend, {}),
    )
    chosen = optional("pack_linear", CUDA, torch.bfloat16)
    assert getattr(chosen, "func", None) is pack_linear
    assert optional("pack_linear", CUDA, torch.float16) is refused
    with override(pack_linear="triton"):
        assert optional("pack_linear", CUDA, torch.bfloat16) is refused
    found.clear()
    assert optional("pack_linear", CUDA, torch.bfloat16) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU to run torch's kernel on")
@pytest.mark.parametrize("group", [32, 128])
def test_on_a_gpu_the_kernel_has_the_files_values_and_a_row_the_same_bits_in_any_batch(group: int) -> None:
    weight = weight_of(512, 1024, group=group, device="cuda")
    product = pack_linear(LinearWeights(weight, None), torch.bfloat16, refused)
    assert isinstance(product, TinyGemmLinear)
    assert product.plain().equal(weight.plain(torch.bfloat16))
    x = torch.randn(130, 1024, device="cuda").bfloat16()
    found, truth = product(x), F.linear(x.double(), weight.plain(torch.bfloat16).double())
    assert (found - truth).norm() <= 0.004 * truth.norm()
    for rows in (1, 16, 17, 64):
        assert product(x[:rows]).equal(found[:rows])
