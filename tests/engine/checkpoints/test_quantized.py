"""Checkpoints that the tools themselves have quantized: what their weights are, and what they answer."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import EngineHarness
from hf import hf_greedy, hf_model
from peft import PeftModel
from quantized_checkpoints import DATA, NAMES, copied, plain
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_adapters import make_adapter_folder
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from personae.engine.checkpoints.huggingface import Folder
from personae.engine.checkpoints.quantized.base import unpack
from personae.engine.loader import load_model
from personae.errors import ModelLoadError
from personae.kernels.registry import optional

CPU = torch.device("cpu")
IN_BITS = {
    **dict.fromkeys(("ct-w4a16", "ct-w3", "ct-w4-channel", "ct-gptq-static", "ct-moe-w4a16"), "Q4_0"),
    **dict.fromkeys(
        ("gptq-sym", "gptq-2bit", "gptq-3bit", "gptq-channel", "autoround", "torchao-int4"), "Q4_0"
    ),
    **dict.fromkeys(
        ("ct-w4a16-asym", "gptq-asym", "gptq-v2", "gptq-8bit", "autoawq", "autoround-gptq"), "Q8_0"
    ),
    "torchao-int4-asym": "Q8_0",
    **dict.fromkeys(("ct-mxfp4", "autoround-mxfp4"), "MXFP4"),
    **dict.fromkeys(("ct-w8-channel", "ct-w8a8", "bnb-int8", "torchao-int8"), "int8"),
    **dict.fromkeys(("ct-fp8-dynamic", "ct-fp8-kv", "ct-fp8-block", "modelopt-fp8"), "fp8"),
    "torchao-fp8": "fp8",
    **dict.fromkeys(("ct-mxfp8", "ct-nvfp4", "gptq-act", "fp8-block", "fp8-block-ue8m0"), None),
    **dict.fromkeys(("bnb-nf4", "bnb-nf4-double", "bnb-fp4"), None),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_is_bit_for_bit_what_the_tool_that_made_it_dequantizes(name: str) -> None:
    folder = Folder(DATA / name)
    stored = folder.tensors(folder.config())
    expected = json.loads((DATA / name / "expected.json").read_text())
    assert expected
    for module, meant in expected.items():
        dtype = meant.split()[0]
        weight = stored[f"{module}.weight"].read() + 0.0  # no minus zeros
        raw = weight.bfloat16().view(torch.int16) if dtype == "bfloat16" else weight.float()
        digest = hashlib.sha256(raw.contiguous().numpy().tobytes()).hexdigest()
        assert f"{dtype} {list(weight.shape)} {digest}" == meant, module


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"ct-mixed"}))
def test_what_stays_in_its_bits_has_the_values_of_the_file(name: str) -> None:
    if optional("pack_linear", CPU, torch.bfloat16) is None:
        pytest.skip("no product with blocks on this machine")
    folder = Folder(DATA / name)
    stored = folder.tensors(folder.config())
    kinds = {tensor.kept for key, tensor in stored.items() if ".layers." in key and "proj" in key}
    assert kinds == {IN_BITS[name]}
    decoder, same = load_model(DATA / name, device=CPU), load_model(plain(name), device=CPU, dtype="bfloat16")
    assert decoder.dtype is torch.bfloat16
    assert (decoder.quantization is None) == (IN_BITS[name] is None)
    for one, other in zip(decoder.layers, same.layers, strict=True):
        for linear, meant in zip(one.linears(), other.linears(), strict=True):
            assert torch.equal(linear.plain(), meant.plain())


def test_modules_of_two_formats_each_keep_their_own() -> None:
    folder = Folder(DATA / "ct-mixed")
    stored = folder.tensors(folder.config())
    kinds = {key.split(".")[3]: tensor.kept for key, tensor in stored.items() if "proj" in key}
    assert kinds == {"self_attn": "fp8", "mlp": "Q4_0"}
    assert load_model(DATA / "ct-mixed", device=CPU).quantization is not None


@pytest.mark.parametrize(
    "name",
    ["gptq-act", "autoawq", "ct-moe-w4a16", "fp8-block", "torchao-int4-asym"],
)
def test_answers_are_those_of_transformers_and_peft_on_the_dequantized_weights(
    name: str, tmp_path: Path
) -> None:
    base = plain(name)
    targets = [f"{end}_proj" for end in ("q", "k", "v", "o")]
    targets += [] if "moe" in name else ["gate_proj", "up_proj", "down_proj"]
    adapter = make_adapter_folder(tmp_path / "adapter", base, rank=5, targets=targets)
    harness = EngineHarness(DATA / name, {"tuned": adapter}, max_batch_tokens=24)
    prompt = [*range(30, 100)]  # in three parts
    first = harness.play(
        [
            harness.log("base", prompt, max_tokens=64),
            harness.log("tuned", prompt, "tuned", max_tokens=64),
            harness.log("short", prompt[:5], max_tokens=64),
        ]
    )
    model = hf_model(base)
    answer = hf_greedy(model, prompt, 64)
    assert first["base"].tokens == answer
    assert first["short"].tokens == hf_greedy(model, prompt[:5], 64)
    again = harness.play([harness.log("again", prompt, max_tokens=64)])["again"]
    assert again.tokens == answer
    assert again.cached == len(prompt) - 1
    tuned = hf_greedy(PeftModel.from_pretrained(model, adapter).eval(), prompt, 64)
    assert first["tuned"].tokens == tuned != answer


def test_a_cpu_answers_from_four_bits_exactly_as_from_the_same_weights_in_bfloat16() -> None:
    if optional("pack_linear", CPU, torch.bfloat16) is None:
        pytest.skip("no product with blocks on this machine")
    logits = []
    for path, dtype in ((DATA / "gptq-sym", "auto"), (DATA / "gptq-sym", "bfloat16")):
        decoder = load_model(path, device=CPU, dtype=dtype)
        assert decoder.quantization == ("gptq" if dtype == "auto" else None)
        logits.append(decoder)
    for one, other in zip(logits[0].layers, logits[1].layers, strict=True):
        assert torch.equal(one.mlp.down.plain(), other.mlp.down.plain())  # type: ignore[attr-defined]  # MLPs
    assert logits[0].weight_bytes < logits[1].weight_bytes


def test_a_quantized_checkpoint_can_be_quantized_anew() -> None:
    decoder = load_model(DATA / "gptq-asym", device=CPU, dtype="float32", quantize="int8")
    same = load_model(plain("gptq-asym"), device=CPU, dtype="float32", quantize="int8")
    assert torch.equal(decoder.layers[1].attention.o.plain(), same.layers[1].attention.o.plain())  # type: ignore[attr-defined]  # attention


K = "model.layers.0.self_attn.k_proj"


def scaled(change: Callable[[torch.Tensor], torch.Tensor], end: str) -> Callable[[dict[str, Any]], None]:
    def applied(weights: dict[str, Any]) -> None:
        weights[f"{K}.{end}"] = change(weights[f"{K}.{end}"]).contiguous()

    return applied


def nan(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.float()
    wide[0] = torch.nan
    return wide.to(tensor.dtype)


def removed(end: str) -> Callable[[dict[str, Any]], None]:
    def applied(weights: dict[str, Any]) -> None:
        del weights[f"{K}.{end}"]

    return applied


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("gptq-sym", scaled(nan, "scales"), f"{K}.qweight has scales that are not finite"),
        ("gptq-sym", scaled(lambda t: t[:1], "scales"), f"{K}.scales: expected [2, 32] F16 or BF16 or F32"),
        ("gptq-sym", scaled(lambda t: t[:, :8], "qweight"), f"{K}.qzeros: has 4 words for 8 outputs"),
        ("gptq-sym", scaled(lambda t: t.float(), "qweight"), "found [8, 32] F32"),
        ("gptq-sym", scaled(lambda t: t + 9, "g_idx"), f"{K}.g_idx: names groups that are not among the 2"),
        ("gptq-sym", removed("qzeros"), f"{K}.qzeros is missing"),
        ("gptq-sym", removed("qweight"), f"unexpected: {K}.g_idx, {K}.qzeros"),
        ("autoawq", scaled(nan, "scales"), f"{K}.qweight has scales that are not finite"),
        ("autoawq", scaled(lambda t: t[:1], "qzeros"), f"{K}.qzeros: expected [2, 4] I32, found [1, 4] I32"),
        ("ct-w4a16", scaled(lambda t: t[:, :1], "weight_packed"), f"{K}.weight_packed: [32, 1] is no weight"),
        ("ct-w4a16", scaled(lambda t: t.repeat(1, 2), "weight_scale"), "groups of 32"),
        ("ct-w4a16", removed("weight_shape"), f"{K}.weight_shape is missing"),
        ("ct-w4a16-asym", scaled(lambda t: t[:, :1], "weight_zero_point"), "weight_zero_point: expected"),
        ("ct-w8a8", scaled(nan, "weight_scale"), f"{K}.weight has scales that are not finite"),
        ("ct-mxfp4", scaled(lambda t: t | 255, "weight_scale"), "has scales that are not finite"),
        ("ct-mxfp4", removed("weight_scale"), f"{K}.weight_scale is missing"),
        ("ct-nvfp4", removed("weight_global_scale"), "has no scale of the whole tensor"),
        (
            "fp8-block",
            scaled(lambda t: t[:, :1], "weight_scale_inv"),
            f"{K}.weight_scale_inv: expected [1, 2]",
        ),
        ("bnb-nf4", scaled(nan, "weight.absmax"), f"{K}.weight has scales that are not finite"),
        (
            "bnb-nf4",
            scaled(lambda t: t.bfloat16(), "weight.absmax"),
            "absmax: expected [32] F32, found [32] BF16",
        ),
        (
            "bnb-nf4",
            scaled(lambda t: t[:9], "weight.quant_state.bitsandbytes__nf4"),
            "cannot be read as JSON",
        ),
        ("bnb-int8", scaled(lambda t: t[:3], "SCB"), f"{K}.SCB: expected [32]"),
        ("torchao-int8", scaled(nan, "_weight_scale"), f"{K}._weight_qdata has scales that are not finite"),
        ("torchao-int8", removed("_weight_scale"), f"{K}._weight_scale is missing"),
        ("torchao-int4", scaled(lambda t: t[:, :1], "_weight_zero_point"), "_weight_zero_point: expected"),
        ("torchao-int4", scaled(lambda t: t + 9, "_weight_qdata"), "not within -8 and 7"),
        ("torchao-int4", scaled(lambda t: t.repeat(1, 2)[:, :3], "_weight_scale"), "expected [32, 3]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_with_file_name_and_reason(
    name: str, change: Callable[[dict[str, Any]], None], why: str, tmp_path: Path
) -> None:
    folder = copied(name, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    change(weights)
    with safe_open(folder / "model.safetensors", "pt") as opened:
        header = opened.metadata()
    save_file(weights, folder / "model.safetensors", header)
    for dtype in ("float32", "auto"):
        with pytest.raises(ModelLoadError) as refused:
            load_model(folder, device=CPU, dtype=dtype)
        assert why in str(refused.value)
        assert "model.safetensors" in str(refused.value) or "unexpected" in why


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    folder = copied("gptq-sym", tmp_path / "model")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(
        ModelLoadError, match=r"model\.safetensors cannot be read .* is the download complete"
    ):
        load_model(folder, device=CPU)


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        (
            "gptq-sym",
            {"quant_method": "hqq"},
            'quant_method: "hqq" is not supported; supported are: auto-round',
        ),
        ("gptq-sym", {"quant_method": ...}, 'quant_method: "" is not supported'),
        (
            "gptq-sym",
            {"checkpoint_format": "gptq_p"},
            'checkpoint_format: "gptq_p" is not supported, only gptq',
        ),
        ("gptq-sym", {"bits": 5}, "bits: 5 is not supported, only 2, 3, 4, 8"),
        ("gptq-sym", {"bits": 8}, "qzeros: has 8 words for 64 outputs, which is not 8 bits"),
        ("gptq-sym", {"group_size": 64}, "scales: has 4 groups, but 128 inputs in groups of 64 have others"),
        ("gptq-sym", {"group_size": 0}, "group_size: must be at least 1"),
        ("gptq-sym", {"rotation": "hadamard"}, 'rotation: "hadamard" is not supported for gptq'),
        ("gptq-sym", {"is_marlin_format": True}, "is_marlin_format"),
        ("autoawq", {"version": "gemv"}, 'version: "gemv" is not supported, only gemm'),
        ("autoawq", {"bits": 8}, "bits: 8 is not supported, only 4"),
        ("autoawq", {"group_size": 64}, "qzeros: expected [2, 8] I32, found [4, 8] I32"),
        ("ct-w4a16", {"format": "marlin-24"}, 'format: "marlin-24" is not supported'),
        ("ct-w4a16", {"sparsity_config": {"format": "dense"}}, "sparsity_config"),
        ("ct-w4a16", {"transform_config": {"r1": 1}}, "transform_config"),
        ("ct-w4a16", {"config_groups": {"a": {"weights": {"num_bits": 16}}}}, 'num_bits: 16 of type "int"'),
        ("ct-w4a16", {"config_groups": {"a": {"weights": {"num_bits": 4, "bias": 1}}}}, "bias: 1"),
        ("fp8-block", {"weight_block_size": [32, 16]}, "weight_block_size: [32, 16] is not supported"),
        ("fp8-block", {"weight_block_size": "32"}, "weight_block_size: expected two sizes"),
        ("fp8-block", {"weight_block_size": [64, 64]}, "weight_scale_inv: expected [1, 2]"),
        ("fp8-block", {"fmt": "e5m2"}, 'fmt: "e5m2" is not supported, only e4m3'),
        ("bnb-nf4", {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
        ("autoround", {"packing_format": "auto_round:marlin"}, 'packing_format: "auto_round:marlin"'),
        ("modelopt-fp8", {"quant_algo": "W4A16_AWQ"}, 'quant_algo: "W4A16_AWQ" is not supported'),
    ],
)
def test_a_config_that_is_not_understood_is_refused_by_the_name_of_its_key(
    name: str, changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError) as refused:
        load_model(copied(name, tmp_path / "model", **changes), device=CPU, dtype="float32")
    assert why in str(refused.value)


def test_the_levels_of_one_word_a_row_are_read_also_from_a_transposed_tensor() -> None:
    """As the zero points of a module with eight outputs are packed."""
    levels = torch.arange(16).view(2, 8)
    words = (levels << torch.arange(0, 32, 4)).sum(1, keepdim=True).to(torch.uint32).view(torch.int32)
    assert unpack(words.T.contiguous().T, 4, 8).tolist() == levels.tolist()


def test_experts_in_mxfp4_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 8, 2, 16), dtype=torch.uint8, generator=random)
    scales = torch.randint(118, 130, (3, 8, 2), dtype=torch.uint8, generator=random)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    save_file({f"{name}_blocks": blocks, f"{name}_scales": scales}, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = Folder(tmp_path).stored()[name]
    meant = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert found.shape == (3, 64, 8)
    assert torch.equal(found.read(), meant)


def torchao_folder(path: Path, kind: str, tensors: dict[str, torch.Tensor]) -> Path:
    """A file with one weight of a class of torchao's, as its documentation lays it out."""
    described = json.dumps({"_type": kind, "_data": {"block_size": [1, 32], "shape": [8, 64]}})
    save_file(
        {f"{K}._weight_{end}": tensor for end, tensor in tensors.items()},
        path / "model.safetensors",
        {f"{K}.weight": described},
    )
    config = {"quantization_config": {"quant_method": "torchao", "quant_type": {"default": {}}}}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_two_levels_of_torchaos_int4_lie_in_a_byte_and_its_zero_points_are_added(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    levels = torch.randint(-8, 8, (8, 64), dtype=torch.int8, generator=random)
    scales, zeros = torch.rand(2, 2, 8, generator=random).bfloat16()
    parts = {"qdata": levels[:, ::2] & 15 | levels[:, 1::2] << 4, "scale": scales, "zero_point": zeros}
    found = Folder(torchao_folder(tmp_path, "Int4Tensor", parts)).stored()[f"{K}.weight"]
    scale, zero = (part.float().T.repeat_interleave(32, 1) for part in (scales, zeros))
    assert found.kept is None
    assert torch.equal(found.read(), levels.float() * scale + zero)


def test_a_weight_that_transformers_has_renamed_is_what_all_weights_of_its_file_are(tmp_path: Path) -> None:
    """As with Hunyuan 3, whose shared expert has another name in files than in transformers."""
    data = DATA / "torchao-int4"
    with safe_open(data / "model.safetensors", "pt") as opened:
        header = opened.metadata()
    stored, old = load_file(data / "model.safetensors"), "model.layers.0.mlp.up_proj"
    renamed = {name.replace(old, "model.layers.0.mlp.shared.up_proj"): part for name, part in stored.items()}
    shutil.copy(data / "config.json", tmp_path)
    save_file(renamed, tmp_path / "model.safetensors", header)
    found = Folder(tmp_path).stored()["model.layers.0.mlp.shared.up_proj.weight"]
    assert torch.equal(found.read(), Folder(data).stored()[f"{old}.weight"].read())
    header["model.layers.1.mlp.up_proj.weight"] = json.dumps({"_type": "Int8Tensor", "_data": {}})
    save_file(renamed, tmp_path / "model.safetensors", header)
    with pytest.raises(ModelLoadError, match="_weight_qdata: the header of the file does not say"):
        Folder(tmp_path).stored()


def test_a_class_of_torchao_that_is_not_plain_is_refused_by_its_name(tmp_path: Path) -> None:
    parts = {"qdata": torch.zeros(1, 4, 32, 4, dtype=torch.int32), "scale": torch.ones(2, 8)}
    why = f'{K}._weight_qdata: "Int4TilePackedTo4dTensor" is not supported, only Int8Tensor'
    with pytest.raises(ModelLoadError, match=re.escape(why)):
        Folder(torchao_folder(tmp_path, "Int4TilePackedTo4dTensor", parts)).stored()
    save_file({f"{K}._weight_qdata": parts["qdata"]}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="_weight_scale is missing"):
        Folder(tmp_path).stored()


def test_a_config_that_is_no_object_is_named(tmp_path: Path) -> None:
    folder = copied("gptq-sym", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": "gptq"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match='quantization_config: expected an object, found "gptq"'):
        load_model(folder, device=CPU)
