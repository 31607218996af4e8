"""GGUF files of the families with experts, and of others that are made by transformers' own classes."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from family_models import make_family_folder
from gguf import GGMLQuantizationType as Type
from gguf_files import blocks, write_gguf
from hf import hf_logits, hf_model, relative_error
from paged import PagedSequences
from safetensors.torch import load_file
from tiny_models import VOCAB, make_model_folder

from personae.engine.checkpoints.gguf.checkpoint import GgufFile
from personae.engine.layers.moe import MoE
from personae.engine.loader import load_model
from personae.errors import ModelLoadError

CPU = torch.device("cpu")
PROMPT = random.Random(5).choices(range(VOCAB), k=60)
OF_TINY = ("qwen3_moe", "mixtral", "olmoe")
OF_FAMILIES = (
    "qwen2_moe",
    "granitemoe",
    "granitemoeshared",
    "gpt_oss",
    "glm4_moe",
    "gemma",
    "gemma2",
    "seed_oss",
    "lfm2",
    "lfm2_moe",
    "granitemoehybrid, Mamba",
    "granitemoehybrid, Mamba, dense",
    "nemotron_h",
    "nemotron_h, dense",
    "nemotron_h, latent experts",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
)


EXPERTS = ("num_local_experts", "num_experts_per_tok")


def folder_of(name: str, path: Path, **overrides: Any) -> Path:
    if name in OF_TINY:
        return make_model_folder(path, name)
    if name.startswith("granitemoehybrid"):
        overrides["mamba_proj_bias"] = False
    if name.startswith("nemotron_h"):
        kind = "mlp" if name.endswith("dense") else "moe"
        kinds = ["linear_attention", kind, "full_attention", kind, "linear_attention"]
        overrides |= {"layers_block_type": kinds, "use_bias": False, "mlp_bias": False}
        name = name.removesuffix(", dense")
    if name.endswith(", dense"):
        overrides |= dict.fromkeys(EXPERTS, 0) | {"shared_intermediate_size": 96}  # its only size in a file
        name = name.removesuffix(", dense")
    if name == "qwen3_next":
        overrides["mlp_only_layers"] = []
    folder = make_family_folder(path, name, **overrides)
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or {}
    changed: dict[str, Any] = {"rope_theta": rope.get("rope_theta", 10000.0)}
    if "partial_rotary_factor" in rope:
        changed["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if rope.get("rope_type") == "yarn":
        changed["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    if name == "deepseek_v3":  # a file has one of both
        changed["rope_scaling"]["mscale"] = changed["rope_scaling"]["mscale_all_dim"]
        changed["rope_parameters"] = changed["rope_scaling"] | {"rope_theta": changed["rope_theta"]}
    if name.startswith(("qwen3_next", "qwen3_5")):
        changed["full_attention_interval"] = 2
    if name == "gemma2":
        changed["query_pre_attn_scalar"] = config["head_dim"]  # as in all but the largest; it is not in files
    (folder / "config.json").write_text(json.dumps(config | changed))
    return folder


def logits_of(path: Path, dtype: str = "float32") -> torch.Tensor:
    decoder = load_model(path, device=CPU, dtype=dtype)
    hidden, _ = PagedSequences(decoder, page_size=8).forward({"a": PROMPT})
    return decoder.logits(hidden).clone()


@pytest.mark.parametrize("name", [*OF_TINY, *OF_FAMILIES])
def test_a_family_has_the_logits_of_the_folder_that_the_file_was_made_from(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path / "folder")
    truth = hf_logits(hf_model(folder), PROMPT)
    file = write_gguf(tmp_path / "model.gguf", folder, Type.F32)
    assert max(map(relative_error, logits_of(file), truth)) < 1e-4


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("type", [Type.Q8_0, Type.Q5_0])
@pytest.mark.parametrize("width", [16, 32])
def test_heads_of_states_in_another_order_keep_their_bits_if_no_block_has_parts_of_two(
    name: str, type: Type, width: int, tmp_path: Path
) -> None:
    sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": width, "head_dim": 32}
    folder = folder_of(name, tmp_path / "folder", **sizes, shared_expert_intermediate_size=64)
    checkpoint = GgufFile(write_gguf(tmp_path / "model.gguf", folder, type))
    found = checkpoint.tensors(checkpoint.config())
    for own, weight in load_file(folder / "model.safetensors").items():
        if ".linear_attn." not in own or weight.dim() != 2:
            continue
        meant = torch.from_numpy(np.array(gguf.quants.dequantize(blocks(weight.numpy(), type), type)))
        if own.endswith("out_proj.weight") and name == "qwen3_5" and width == 16:
            assert found[own].kept is None
        else:
            assert found[own].kept == type.name
            same = gguf.quants.dequantize(found[own].blocks(type.name).numpy(), type)
            assert torch.equal(torch.from_numpy(np.array(same)), meant)
            assert torch.equal(found[own].read(), meant)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda writer: writer.add_rope_dimension_sections([1, 0, 0, 1]), "rope.dimension_sections: "),
        (lambda writer: writer.add_ssm_inner_size(81), "ssm.inner_size: 81 is not a multiple of 4 heads"),
        (lambda writer: writer.add_ssm_group_count(3), "linear_num_value_heads: 4 is not a multiple of 3"),
        (lambda writer: writer.add_ssm_time_step_rank(2), "linear_attn"),
    ],
)
def test_sizes_of_states_that_do_not_fit_are_refused_by_name(
    change: Callable[[gguf.GGUFWriter], None], error: str, tmp_path: Path
) -> None:
    def replacing(writer: gguf.GGUFWriter) -> None:
        known = {**writer.kv_data[0]}
        writer.kv_data[0].clear()
        change(writer)
        writer.kv_data[0] = known | writer.kv_data[0]

    file = write_gguf(tmp_path / "model.gguf", folder_of("qwen3_5", tmp_path / "folder"), change=replacing)
    with pytest.raises(ModelLoadError, match=error):
        load_model(file, device=CPU)


@pytest.mark.parametrize("name", ["deepseek_v2, as V2-Lite", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
@pytest.mark.parametrize("joined", [True, False])
def test_latent_attention_has_the_logits_of_the_folder(name: str, joined: bool, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path / "folder")
    truth = hf_logits(hf_model(folder), PROMPT)
    config = json.loads((folder / "config.json").read_text())

    def as_the_cache_has_them(writer: gguf.GGUFWriter) -> None:
        fields, latent = writer.kv_data[0], config["kv_lora_rank"]
        fields["deepseek2.attention.head_count_kv"].value = 1
        for name, width in (("key", latent + config["qk_rope_head_dim"]), ("value", latent)):
            field = fields[f"deepseek2.attention.{name}_length"]
            writer.add_key_value(f"deepseek2.attention.{name}_length_mla", field.value, field.type)
            field.value = width

    file = write_gguf(
        tmp_path / "model.gguf", folder, joined=joined, change=None if joined else as_the_cache_has_them
    )
    assert max(map(relative_error, logits_of(file), truth)) < 1e-4


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("type", [Type.Q8_0, Type.Q4_0, Type.Q4_1])
def test_experts_keep_the_files_bits(name: str, type: Type, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path / "folder")
    file = write_gguf(tmp_path / "model.gguf", folder, type)
    kept, plain = load_model(file, device=CPU), load_model(file, device=CPU, dtype="float32")
    assert kept.quantization == type.name
    assert kept.weight_bytes < 0.5 * plain.weight_bytes
    ours, theirs = kept.layers[1].mlp, plain.layers[1].mlp
    assert isinstance(ours, MoE)
    assert isinstance(theirs, MoE)
    for here, there in ((ours.gate_up, theirs.gate_up), (ours.down, theirs.down)):
        assert here.plain().float().equal(there.plain().bfloat16().float())
    error = sum(map(relative_error, logits_of(file, "auto"), logits_of(file))) / len(PROMPT)
    assert error < 0.15  # inputs are rounded to 8 bits, and a router's close calls fall otherwise


def test_a_layer_for_further_tokens_is_left_out(tmp_path: Path) -> None:
    folder = folder_of("glm4_moe", tmp_path / "folder")
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]

    def with_one_more(writer: gguf.GGUFWriter) -> None:
        writer.add_key_value("glm4moe.nextn_predict_layers", 1, gguf.GGUFValueType.UINT32)
        writer.kv_data[0]["glm4moe.block_count"].value = layers + 1
        writer.add_tensor(f"blk.{layers}.nextn.eh_proj.weight", np.zeros((8, 8), np.float32))
        writer.add_tensor(f"blk.{layers}.attn_norm.weight", np.zeros(8, np.float32))

    plain = write_gguf(tmp_path / "plain.gguf", folder)
    more = write_gguf(tmp_path / "more.gguf", folder, change=with_one_more)
    assert logits_of(more).equal(logits_of(plain))


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("expert_gating_func", 2, gguf.GGUFValueType.UINT32),
        ("expert_weights_scale", 2.0, gguf.GGUFValueType.FLOAT32),
        ("expert_count", 7, gguf.GGUFValueType.UINT32),
        ("expert_used_count", 9, gguf.GGUFValueType.UINT32),
        ("expert_group_count", 2, gguf.GGUFValueType.UINT32),
        ("expert_shared_count", 1, gguf.GGUFValueType.UINT32),
    ],
)
def test_what_does_not_fit_the_experts_is_refused_by_name(
    key: str, value: Any, kind: gguf.GGUFValueType, tmp_path: Path
) -> None:
    folder = folder_of("qwen3_moe", tmp_path / "folder")

    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(f"qwen3moe.{key}", None)
        writer.add_key_value(f"qwen3moe.{key}", value, kind)

    file = write_gguf(tmp_path / "model.gguf", folder, change=change)
    with pytest.raises(ModelLoadError, match=f"{key}|expected 7 experts|num_experts_per_tok"):
        load_model(file, device=CPU)
