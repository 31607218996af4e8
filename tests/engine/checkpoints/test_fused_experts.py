"""Checkpoints with all experts of a layer in one tensor, and gpt-oss' in MXFP4."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from family_models import make_family_folder
from hf import hf_logits, hf_model, relative_error
from paged import PagedSequences
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from personae.engine.loader import load_model
from personae.errors import ModelLoadError
from personae.kernels.registry import optional

CPU = torch.device("cpu")
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


def in_mxfp4(folder: Path, target: Path) -> Path:
    """The folder with random experts in MXFP4. `folder` gets the same, dequantized by transformers."""
    shutil.copytree(folder, target)
    generator, plain = torch.Generator().manual_seed(1), load_file(folder / "model.safetensors")
    packed = dict(plain)
    for name, tensor in plain.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator).to(
            torch.uint8
        )
        scales = torch.randint(121, 125, (experts, outputs, inputs // 32), generator=generator).to(
            torch.uint8
        )
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(packed, target / "model.safetensors", {"format": "pt"})
    save_file(plain, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))
    return target


@pytest.mark.parametrize("case", ["lfm2_moe", "minimax_m2"])
def test_experts_with_the_usual_names_are_read_in_families_that_have_others(
    case: str, tmp_path: Path
) -> None:
    folder = make_family_folder(tmp_path, case)
    file, tokens = folder / "model.safetensors", [*range(40, 90)]
    truth, usual = (
        hf_logits(hf_model(folder), tokens),
        {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"},
    )
    renamed = {
        re.sub(r"(experts\.\d+)\.(w\d)", lambda found: f"{found[1]}.{usual[found[2]]}", name): tensor
        for name, tensor in load_file(file).items()
    }
    assert renamed.keys() != load_file(file).keys()
    save_file(renamed, file, {"format": "pt"})  # as llm-compressor names them
    decoder = load_model(folder, device=CPU, dtype="float32")
    hidden, _ = PagedSequences(decoder).forward({"a": tokens})
    assert max(map(relative_error, decoder.logits(hidden), truth)) < 1e-4


def test_experts_of_gpt_oss_in_mxfp4_are_what_transformers_dequantizes(tmp_path: Path) -> None:
    plain = make_family_folder(tmp_path / "plain", "gpt_oss")
    packed = in_mxfp4(plain, tmp_path / "packed")
    tokens = [*range(40, 90)]
    truth = hf_logits(hf_model(plain), tokens)
    decoder = load_model(packed, device=CPU, dtype="float32")
    hidden, _ = PagedSequences(decoder).forward({"a": tokens})
    assert max(map(relative_error, decoder.logits(hidden), truth)) < 1e-4


@pytest.mark.parametrize("in_one_call", [False, True])
def test_experts_of_gpt_oss_in_mxfp4_stay_in_its_bits(in_one_call: bool, tmp_path: Path) -> None:
    if optional("pack_linear", CPU, torch.bfloat16) is None:
        pytest.skip("no product with blocks on this machine")
    sizes = {"hidden_size": 128, "head_dim": 64} if in_one_call else {}
    packed = in_mxfp4(make_family_folder(tmp_path / "plain", "gpt_oss", **sizes), tmp_path / "packed")
    kept, plain = load_model(packed, device=CPU), load_model(packed, device=CPU, dtype="bfloat16")
    assert (kept.quantization, plain.quantization) == ("mxfp4", None)
    assert kept.runs_in_one_call == (in_one_call and optional("fuse", CPU, torch.bfloat16) is not None)
    assert kept.weight_bytes < plain.weight_bytes
    for one, other in zip(kept.layers, plain.layers, strict=True):
        for linear, same in zip(one.linears(), other.linears(), strict=True):
            assert torch.equal(linear.plain(), same.plain())
    found, meant = (
        decoder.logits(PagedSequences(decoder).forward({"a": [*range(40, 90)]})[0]).clone()
        for decoder in (kept, plain)
    )
    errors = (found - meant).norm(dim=1) / meant.norm(dim=1)
    assert errors.median() < 0.1  # inputs are rounded to bytes, with which a token may go to another expert


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {f"{GATE_UP}_scales": None},
            rf"{GATE_UP}_blocks: expected four dimensions, and {GATE_UP}_scales beside it",
        ),
        (
            {f"{GATE_UP}_scales": torch.zeros(8, 192, 1, dtype=torch.uint8)},
            r"expected \[8, 192, 2\] U8, found",
        ),
        (
            {f"{GATE_UP}_scales": torch.full((8, 192, 2), 255, dtype=torch.uint8)},
            "scales that are not finite",
        ),
        ({f"{GATE_UP}_bias": torch.zeros(8, 3)}, r"gate_up_proj_bias: expected \[8, 192\]"),
        ({f"{GATE_UP}_bias": None}, r"missing: model\.layers\.1\.mlp\.experts\.0\.gate_proj\.bias"),
    ],
)
def test_tensors_of_experts_that_do_not_fit_are_named(
    change: dict[str, torch.Tensor | None], why: str, tmp_path: Path
) -> None:
    plain = make_family_folder(tmp_path / "plain", "gpt_oss")
    folder = in_mxfp4(plain, tmp_path / "packed")
    tensors = {**load_file(folder / "model.safetensors"), **change}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=why):
        load_model(folder, device=CPU, dtype="float32")


def test_the_layers_for_further_tokens_of_glm_4_5_are_left_out(tmp_path: Path) -> None:
    folder = make_family_folder(tmp_path, "glm4_moe", num_nextn_predict_layers=1)
    tensors = load_file(folder / "model.safetensors")
    further = {
        "model.layers.3.eh_proj.weight": torch.ones(64, 128),
        "model.layers.3.enorm.weight": torch.ones(64),
    }
    save_file(tensors | further, folder / "model.safetensors", {"format": "pt"})
    assert load_model(folder, device=CPU, dtype="float32").config.mtp_layers == 1
    other = {"model.layers.4.enorm.weight": torch.ones(64)}
    save_file(tensors | other, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"unexpected: model\.layers\.4\.enorm"):
        load_model(folder, device=CPU, dtype="float32")
