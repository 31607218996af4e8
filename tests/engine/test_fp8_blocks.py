"""Weights in FP8 with blocks of 128: what is kept, and the product that a Hopper GPU has for them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType, scaled_mm
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from personae.engine.checkpoints.huggingface import Folder
from personae.engine.quantization import fp8_blocks
from personae.engine.quantization.fp8 import Fp8Weight
from personae.engine.quantization.fp8_blocks import BlockFp8, BlockFp8Weight, multiplied

CPU, CUDA, FP8 = torch.device("cpu"), torch.device("cuda"), torch.float8_e4m3fn
NAME = "model.layers.0.mlp.down_proj.weight"


def hopper(monkeypatch: pytest.MonkeyPatch, major: int = 9, cuda: str = "13.0") -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, 0))


def folder_of(path: Path, outputs: int, inputs: int, block: int = 128) -> tuple[Folder, Tensor]:
    """A checkpoint as DeepSeek and Qwen write it, and its weight as transformers dequantizes it."""
    random = torch.Generator().manual_seed(outputs)
    values = torch.randn(outputs, inputs, generator=random).mul(100).clamp(-448, 448).to(FP8)
    scales = torch.rand(-(-outputs // block), -(-inputs // block), generator=random)
    how = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block]}
    (path / "config.json").write_text(json.dumps({"quantization_config": how}))
    save_file({NAME: values, f"{NAME}_scale_inv": scales}, path / "model.safetensors")
    plain = (
        values.float() * scales.repeat_interleave(block, 0)[:outputs].repeat_interleave(block, 1)[:, :inputs]
    )
    if outputs % block == 0 and inputs % block == 0:
        assert Fp8Dequantize(None)._dequantize_one(values, scales, torch.float32).equal(plain)
    return Folder(path), plain


@pytest.mark.parametrize(("outputs", "inputs"), [(256, 384), (320, 128)])
def test_what_is_kept_are_the_values_of_the_file(outputs: int, inputs: int, tmp_path: Path) -> None:
    folder, plain = folder_of(tmp_path, outputs, inputs)
    stored = folder.stored()[NAME]
    assert stored.kept == "fp8_blocks"
    kept = BlockFp8Weight.empty(outputs, inputs, CPU)
    kept.load(stored)
    assert kept.plain(torch.float32).equal(plain)
    assert kept.finite()
    for own, part in zip(kept.split(96), torch.split(plain, 96), strict=True):  # not along blocks
        assert own.plain(torch.float32).equal(part)
    rounded = Fp8Weight.empty(outputs, inputs, CPU)
    rounded.load(stored)
    assert rounded.plain(torch.float32).equal(plain) == (inputs == 128)  # else one scale has not all values
    assert (rounded.plain(torch.float32) - plain).norm() < 0.04 * plain.norm()


@pytest.mark.parametrize(("inputs", "block"), [(192, 128), (256, 64)])
def test_blocks_without_a_product_are_not_kept(inputs: int, block: int, tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path, 128, inputs, block)
    assert folder.stored()[NAME].kept is None


@pytest.mark.parametrize(
    ("major", "cuda", "there"),
    [(9, "13.0", True), (9, "12.8", False), (8, "13.0", False), (10, "13.0", False)],
)
def test_they_stay_where_cublas_multiplies_them(
    major: int, cuda: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper(monkeypatch, major, cuda)
    assert multiplied(CUDA) == there
    assert not multiplied(CPU)
    folder, _ = folder_of(tmp_path, 128, 128)
    stored, config = folder.stored(), Any
    for dtype, kept in (("auto", there), ("bfloat16", False)):
        monkeypatch.setattr(config, "dtype", "bfloat16", raising=False)
        method = folder.numerics(config, stored, CUDA, dtype, None).scheme([NAME.removesuffix(".weight")])
        assert (method is BlockFp8) == kept


def emulated(called: list[int], *args: Any, **kwargs: Any) -> Tensor:
    """The product with a scale for each 128 inputs of both sides. torch's own checks of it are run."""
    with FakeTensorMode():
        made = [
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="cuda")
            if isinstance(each, Tensor)
            else each
            for each in args
        ]
        assert scaled_mm(*made, **kwargs).shape == (len(args[0]), args[1].shape[1])
    a, b, scale_a, recipe_a, scale_b, recipe_b = args
    assert recipe_a == recipe_b == ScalingType.BlockWise1x128
    called.append(len(a))
    wide = [
        (values.double().view(len(values), -1, 128) * scales[:, :, None]).flatten(1)
        for values, scales in ((a, scale_a), (b.t(), scale_b))
    ]
    return (wide[0].nan_to_num() @ wide[1].T).to(kwargs["output_dtype"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inputs", [128, 384])
def test_a_product_is_that_of_inputs_that_are_rounded_in_groups(
    dtype: torch.dtype, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper(monkeypatch)
    rows: list[int] = []
    monkeypatch.setattr(fp8_blocks, "scaled_mm", lambda *args, **kwargs: emulated(rows, *args, **kwargs))
    monkeypatch.setattr(fp8_blocks, "multiplied", lambda _device: True)
    method = BlockFp8(48, inputs, dtype, CPU)
    method.weight.copy_(torch.randn(48, inputs))
    bias = torch.randn(48, dtype=dtype)
    product = method.finish(bias)
    plain = product.plain().double()
    for count in (1, 4, 6):
        x = torch.randn(count, inputs, dtype=dtype)
        x[0] *= torch.logspace(-3, 3, inputs // 128).repeat_interleave(128)  # each group has its own scale
        x[-1, :128] = 0
        found, truth = product.apply(x, bias), F.linear(x.double(), plain, bias.double())
        assert found.dtype is dtype
        assert ((found - truth).norm(dim=1) < 0.05 * truth.norm(dim=1)).all()
    assert rows == [4, 4, 8]
    assert product.apply(torch.empty(0, inputs, dtype=dtype), bias).shape == (0, 48)


def test_outputs_that_are_not_in_sixteens_are_multiplied_by_the_plain_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hopper(monkeypatch)
    monkeypatch.setattr(fp8_blocks, "multiplied", lambda _device: True)
    method = BlockFp8(40, 128, torch.float32, CPU)
    method.weight.copy_(torch.randn(40, 128))
    x = torch.randn(3, 128)
    assert method.finish(None).apply(x, None).equal(F.linear(x, method.plain()))


@pytest.mark.skipif(
    not torch.cuda.is_available() or not multiplied(CUDA), reason="no Hopper GPU to run cuBLAS's product on"
)
@pytest.mark.parametrize("rows", [1, 5, 64, 300])
def test_on_a_gpu_the_product_is_that_of_the_rounded_numbers(rows: int) -> None:
    method = BlockFp8(512, 1024, torch.bfloat16, CUDA)
    method.weight.copy_(torch.randn(512, 1024, device=CUDA))
    x, product = torch.randn(rows, 1024, device=CUDA).bfloat16(), method.finish(None)
    truth = F.linear(x.double(), method.plain().double())
    assert (product.apply(x, None) - truth).norm() < 0.05 * truth.norm()
