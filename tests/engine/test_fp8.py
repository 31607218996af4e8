"""Weights and activations in FP8: what is kept, what is multiplied, and checkpoints that have it so."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from engine_harness import EngineHarness, comms_of
from hf import hf_greedy, hf_model, quantized
from safetensors.torch import load_file, save_file
from tiny_models import model_folder

from personae.actors.assembly import assemble
from personae.actors.options import EngineOptions
from personae.engine.loader import load_model
from personae.engine.parallel.comm import SharedMemory
from personae.engine.quantization.fp8 import Fp8, Fp8Weight, to_fp8
from personae.errors import LoadError, ModelLoadError

CPU, FP8 = torch.device("cpu"), torch.float8_e4m3fn


def test_what_is_kept_is_within_half_a_step_of_e4m3() -> None:
    weight = torch.randn(8, 96) * torch.logspace(-6, 6, 8)[:, None]
    kept = Fp8Weight.empty(8, 96, CPU)
    kept.copy_(weight)
    step = 2.0 ** torch.floor(torch.log2((weight.abs() / kept.scales).clamp_min(2.0**-6))) / 8 * kept.scales
    assert ((kept.plain(torch.float32) - weight).abs() <= step / 2 * (1 + 1e-5)).all()
    assert torch.equal(kept.values.float().abs().amax(1), torch.full((8,), 448.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_product_is_that_of_the_rounded_numbers_and_a_row_of_zeros_is_the_bias(dtype: torch.dtype) -> None:
    method = Fp8(48, 80, dtype, CPU)
    method.weight.copy_(torch.randn(48, 80))
    x, bias = torch.randn(6, 80, dtype=dtype), torch.randn(48, dtype=dtype)
    x[3] = 0
    values, scales = to_fp8(x)
    truth = (values.float() * scales).nan_to_num() @ method.plain().double().float().T + bias
    found = method.apply(x, bias)
    assert found.dtype is dtype
    assert torch.equal(found[3], bias)
    torch.testing.assert_close(found.float(), truth, rtol=0, atol=float(truth.abs().max()) * 2.0**-7)


def test_a_row_that_is_not_finite_spoils_no_other_row() -> None:
    method = Fp8(16, 32, torch.float32, CPU)
    method.weight.copy_(torch.randn(16, 32))
    x = torch.randn(3, 32)
    alone = method.apply(x, None)
    x[1, 5] = torch.inf
    found = method.apply(x, None)
    assert torch.equal(found[[0, 2]], alone[[0, 2]])
    assert not found[1].isfinite().all()


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_have_parts_of_a_row_round_it_by_one_scale_as_one_process_does(size: int) -> None:
    whole = Fp8(48, 96, torch.float32, CPU)
    whole.weight.copy_(torch.randn(48, 96))
    x = torch.randn(6, 96) * torch.logspace(-2, 2, 96)
    width = 96 // size

    def part(comm: SharedMemory) -> torch.Tensor:
        method = Fp8(48, width, torch.float32, CPU)
        method.weight.values.copy_(whole.weight.values[:, comm.rank * width :][:, :width])
        method.weight.scales.copy_(whole.weight.scales)
        method.ranks = comm
        return method.apply(x[:, comm.rank * width :][:, :width].contiguous(), None)

    with ThreadPoolExecutor(size) as threads:
        found = sum(threads.map(part, comms_of(size)))
    truth = whole.apply(x, None)
    torch.testing.assert_close(found, truth, rtol=0, atol=float(truth.abs().max()) * 1e-5)


def test_a_product_has_its_shape_on_a_device_that_computes_nothing() -> None:
    method = Fp8(48, 64, torch.bfloat16, torch.device("meta"))
    y = method.apply(torch.empty(5, 64, dtype=torch.bfloat16, device="meta"), None)
    assert (y.shape, y.dtype) == ((5, 48), torch.bfloat16)


def in_fp8(folder: Path, *, per_row: bool) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Rewrites a model's linear modules of its layers as a checkpoint in FP8 has them."""
    weights, found = load_file(folder / "model.safetensors"), {}
    for name in [name for name in weights if ".layers." in name and weights[name].dim() == 2]:
        weight = weights[name].float()
        scale = (weight.abs().amax(1, keepdim=True) if per_row else weight.abs().max().reshape(1)) / 448
        values = (weight / scale).to(FP8)
        weights[name], weights[f"{name}_scale"] = values, scale
        weights[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
        found[name] = values, scale.reshape(-1, 1).expand(len(values), 1)
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    (folder / "config.json").write_text(json.dumps(config))
    return found


@pytest.mark.parametrize("per_row", [True, False], ids=["a scale for each row", "one scale"])
def test_a_checkpoint_in_fp8_keeps_its_own_bits_and_answers_as_its_plain_weights_do(
    per_row: bool, tmp_path: Path
) -> None:
    base = model_folder("llama")
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    kept = in_fp8(folder, per_row=per_row)
    decoder = load_model(folder, device=CPU)
    assert decoder.quantization == "fp8"
    layer, prefix = decoder.layers[1], "model.layers.1.self_attn"
    own = layer.attention.qkv.method.weight
    values, scales = (
        torch.cat([kept[f"{prefix}.{module}_proj.weight"][part] for module in "qkv"]) for part in (0, 1)
    )
    assert torch.equal(own.values.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(own.scales, scales)
    model = hf_model(base)
    for name, (values, scales) in kept.items():
        model.get_parameter(name).data.copy_(values.float() * scales)
    harness = EngineHarness(folder)
    prompt = [*range(20, 50)]
    played = harness.play([harness.log("a", prompt, max_tokens=16)])
    if per_row:  # rounding them again changes nothing
        assert played["a"].tokens == hf_greedy(quantized(model, "fp8"), prompt, 16)
    assert harness.engine.worker.model.quantization == "fp8"


def test_a_model_in_bfloat16_is_quantized_on_a_cpu_with_or_without_a_backend_of_its_own() -> None:
    shapes = (
        {},
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 128},
    )
    for shape in shapes:  # the second is one that a CPU's backend runs in one call
        harness = EngineHarness(model_folder("llama", **shape), dtype="bfloat16", quantize="fp8")
        played = harness.play([harness.log("a", [*range(20, 50)], max_tokens=4)])
        assert len(played["a"].tokens) == 4
        assert harness.engine.worker.model.quantization == "fp8"


def test_scales_of_blocks_and_weights_without_scales_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder("llama"), folder)
    name = "model.layers.0.mlp.down_proj.weight"
    weights = load_file(folder / "model.safetensors")
    weights[name] = weights[name].to(FP8)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(
        ModelLoadError, match=r"unsupported dtype: model\.layers\.0\.mlp\.down_proj\.weight \(F8_E4M3\)"
    ):
        load_model(folder, device=CPU)
    weights[f"{name}_scale"] = torch.ones(2, 3)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"down_proj\.weight_scale: \[2, 3\] F32 are no scales of"):
        load_model(folder, device=CPU)


def test_a_gpu_that_does_not_multiply_fp8_is_named_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _device=None: (8, 0))
    with pytest.raises(LoadError, match=r"--quantize fp8 needs a GPU of compute capability 8\.9"):
        assemble(EngineOptions(model_folder("qwen3"), quantize="fp8"))
