import weakref

import pytest
import torch
import torch.nn.functional as F
from hf import relative_error

from personae.engine.layers.linear import Linear
from personae.engine.quantization import WEIGHT_ONLY, scheme_of
from personae.engine.quantization.unquantized import Unquantized, can_pack

CPU = torch.device("cpu")


def linear(dtype: torch.dtype, *, bias: bool) -> Linear:
    module = Linear(("a", "b"), 96, (64, 32), bias=bias, method=Unquantized, dtype=dtype, device=CPU)
    generator = torch.Generator().manual_seed(0)
    for _, tensor in module.tensors():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return module


def test_its_tensors_are_the_rows_of_each_module_in_one_matrix() -> None:
    module = linear(torch.float32, bias=True)
    tensors = dict(module.tensors())
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "a.weight": (64, 96),
        "b.weight": (32, 96),
        "a.bias": (64,),
        "b.bias": (32,),
    }
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    apart = [x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"] for name in "ab"]
    assert relative_error(module(x), torch.cat(apart, dim=1)) < 1e-6


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_packing_changes_the_layout_and_not_the_product(dtype: torch.dtype, rows: int, bias: bool) -> None:
    module = linear(dtype, bias=bias)
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    plain = module(x)
    module.pack()
    packed = module(x)
    assert packed.dtype == dtype
    assert relative_error(packed.float(), plain.float()) <= (0.01 if dtype is torch.bfloat16 else 0.0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("quantization", WEIGHT_ONLY)
def test_a_quantized_weight_is_multiplied_the_same_packed_and_not(
    quantization: str, dtype: torch.dtype, rows: int, bias: bool
) -> None:
    generator = torch.Generator().manual_seed(2)
    method = scheme_of(quantization)(["a", "b"])
    module = Linear(("a", "b"), 100, (40, 30), bias=bias, method=method, dtype=dtype, device=CPU)
    for _, place in module.tensors():
        place.copy_(torch.randn(place.shape, generator=generator))
    x = torch.randn(rows, 100, generator=generator).to(dtype)
    weight, plain = module.plain(), module(x)
    assert relative_error(plain, F.linear(x, weight, module.bias)) == 0
    module.pack()
    packed = module(x)
    assert packed.dtype == dtype
    rounding = 0.02 if dtype is torch.bfloat16 else 0.0  # of inputs to 255 levels
    assert relative_error(packed.float(), plain.float()) <= rounding
    assert torch.equal(module.plain(), weight)


def test_a_packed_weight_is_held_once() -> None:
    module = linear(torch.bfloat16, bias=False)
    weight = module.method.weight
    assert isinstance(weight, torch.Tensor)
    packed, held = can_pack(weight), weakref.ref(weight)
    del weight
    module.pack()
    assert (held() is None) is packed


def test_only_bfloat16_is_packed() -> None:
    assert not can_pack(torch.ones(8, 8))
    assert not can_pack(torch.ones(8, 8, dtype=torch.float16))
