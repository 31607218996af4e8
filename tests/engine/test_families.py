"""A family of every kind of block against transformers and PEFT. `python -m personae.evals.families` checks
all."""

import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checks import check_family
from family_models import CASES, DELTA, SIZES, make_family_folder, randomize
from hf import hf_logits, hf_model, relative_error
from paged import PagedSequences
from safetensors.torch import load_file, save_file
from tiny_models import model_folder
from transformers import (
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Llama4TextConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from personae.engine.config_file import read_config
from personae.engine.loader import load_model
from personae.engine.models import FAMILIES, MODEL_TYPES
from personae.errors import LoadError

SAMPLE = [
    "glm4",  # interleaved rotary embedding over half of the head, four norms
    "deepseek_v3",  # latent attention; routing with a correction and groups, a shared expert, a dense layer
    "granitemoehybrid, Mamba",  # Mamba-2; experts in one tensor, a merged shared MLP
    "gemma2",  # soft caps
    "ministral3",  # q scaled by position
    "llama4",  # chunks, norms without weights, weights of the experts' inputs
    "gemma4",  # embeddings for each layer, keys and values of other layers, heads of two sizes
    "gemma3n",  # several residual streams, gates that are cut off, an MLP of two sizes
    "nemotron_h",  # one block a layer, experts without a gate
    "nemotron_h, latent experts",
    "falcon_h1",  # attention and Mamba-2 in parallel, scales
    "gpt_oss",  # sinks, clamped experts with biases
    "cohere2",  # LayerNorm, parallel halves
    "starcoder2",  # no gate
    "lfm2",  # short convolutions
    "qwen3_next",  # gated delta nets and gated attention
]


QWEN35_SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
}


def test_keys_of_layers_that_a_nemotron_does_not_have_change_nothing(tmp_path: Path) -> None:
    for kind, others in (("moe", {"intermediate_size": 99}), ("mlp", {"n_routed_experts": 99, "n_group": 3})):
        kinds = ["linear_attention", kind, "full_attention"]
        folder = make_family_folder(tmp_path / kind, "nemotron_h", layers_block_type=kinds)
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | others))
        load_model(folder, device=torch.device("cpu"))


@pytest.mark.parametrize("case", SAMPLE)
def test_a_family_gives_what_transformers_and_peft_give(case: str, tmp_path: Path) -> None:
    report = check_family(case, tmp_path)
    assert report.passed, str(report)


def test_the_decoder_of_a_model_that_reads_images_and_predicts_further_tokens_is_served(
    tmp_path: Path,
) -> None:
    text = {name: value for name, value in SIZES.items() if name in QWEN35_SIZES} | DELTA
    config = Qwen3_5Config(
        text_config=text,
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
    )
    model = Qwen3_5ForConditionalGeneration(config).eval()
    randomize(model, 0, offset=0.0)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "mtp.fc.weight": torch.zeros(64, 128)}, file, {"format": "pt"})
    tokens = [*range(30, 80)]
    decoder = load_model(tmp_path, device=torch.device("cpu"), dtype="float32")
    hidden, _ = PagedSequences(decoder).forward({"a": tokens})
    with torch.no_grad():
        truth = model(input_ids=torch.tensor([tokens])).logits[0]
    assert max(map(relative_error, decoder.logits(hidden), truth)) < 1e-4


def _text(config: type[PreTrainedConfig], case: str) -> dict[str, Any]:
    """The sizes of a case that the class of its config knows."""
    names = {field.name for field in fields(config)} | {"global_head_dim"}
    changes = {**SIZES, **CASES[case][1]}
    return {name: value for name, value in changes.items() if name in names}


def _llama4() -> PreTrainedModel:
    config = Llama4Config(
        text_config=_text(Llama4TextConfig, "llama4"),
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "vision_output_dim": 16,
            "projector_output_dim": 16,
            "projector_input_dim": 16,
        },
    )
    return Llama4ForConditionalGeneration(config)


def _gemma4() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Gemma4Config(
        text_config=_text(Gemma4TextConfig, "gemma4") | {"pad_token_id": 3},
        vision_config={**sizes, "num_key_value_heads": 1, "head_dim": 16, "position_embedding_size": 8},
    )
    return Gemma4ForConditionalGeneration(config)


@pytest.mark.parametrize("make", [_llama4, _gemma4])
def test_the_decoder_of_a_model_with_images_is_served(
    make: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    model = make().eval()
    randomize(model, 0, offset=1.0)
    model.save_pretrained(tmp_path)
    tokens = [*range(30, 80)]
    decoder = load_model(tmp_path, device=torch.device("cpu"), dtype="float32")
    hidden, _ = PagedSequences(decoder).forward({"a": tokens})
    with torch.no_grad():
        truth = model(input_ids=torch.tensor([tokens])).logits[0]
    assert max(map(relative_error, decoder.logits(hidden), truth)) < 1e-4


def test_keys_that_a_file_has_of_layers_that_share_those_of_others_are_left_out(tmp_path: Path) -> None:
    folder = make_family_folder(tmp_path, "gemma4")
    file = folder / "model.safetensors"
    further = {f"model.layers.4.self_attn.{name}_proj.weight": torch.zeros(32, 64) for name in "kv"}
    norms = {"model.layers.4.self_attn.k_norm.weight": torch.zeros(16)}
    save_file({**load_file(file), **further, **norms}, file, {"format": "pt"})
    load_model(folder, device=torch.device("cpu"), dtype="float32")
    save_file({**load_file(file), "model.layers.2.self_attn.x_proj.weight": torch.zeros(1)}, file)
    with pytest.raises(LoadError, match=r"model\.layers\.2\.self_attn\.x_proj"):
        load_model(folder, device=torch.device("cpu"), dtype="float32")


def test_chunks_no_shorter_than_the_context_leave_the_usual_attention(tmp_path: Path) -> None:
    folder = make_family_folder(tmp_path, "llama4")
    for longest, changed in ((37, [False] * 4), (38, [True, False, False, True])):
        decoder = load_model(folder, device=torch.device("cpu"), max_position=longest)
        assert [layer in decoder._scores for layer in range(4)] == changed


@pytest.mark.parametrize(
    ("case", "name", "value", "error"),
    [
        ("gemma4", "num_kv_shared_layers", 6, "num_kv_shared_layers: 6 of 6 layers"),
        ("gemma4", "num_kv_shared_layers", 5, "num_kv_shared_layers: layer 1 has no layer whose keys"),
        ("gemma4", "vocab_size_per_layer_input", 9, "vocab_size_per_layer_input: 9 is less than"),
        ("gemma4", "use_bidirectional_attention", "all", 'use_bidirectional_attention: only "vision"'),
        ("nemotron_h", "layers_block_type", ["mamba", "other"], "layers_block_type: expected the kind"),
        ("nemotron_h", "moe_latent_size", -1, "moe_latent_size: must be at least 1"),
        ("nemotron_h", "n_groups", 3, "n_groups: 3 groups do not divide 8 heads"),
        ("falcon_h1", "layers_block_type", ["mamba"] * 3, "layers_block_type: expected 3 times hybrid"),
        ("falcon_h1", "mamba_d_ssm", 100, "mamba_d_head: 8 heads of 12 are not 100 numbers"),
        ("falcon_h1", "projectors_bias", False, "projectors_bias: is not supported without"),
        ("falcon_h1", "ssm_multipliers", [1.0], "ssm_multipliers: expected 5 numbers"),
        ("llama4", "no_rope_layers", [1, 2, 0, 1], "no_rope_layers: expected 4 times 0 or 1"),
        ("llama4", "moe_layers", [4], "moe_layers: expected numbers of the 4 layers"),
        (
            "llama4",
            "layer_types",
            ["sliding_attention"] * 4,
            'layer_types: expected 4 times "chunked_attention"',
        ),
        ("llama4", "attention_chunk_size", 0, "attention_chunk_size: must be at least 1"),
    ],
)
def test_wrong_fields_are_refused_by_name(
    case: str, name: str, value: object, error: str, tmp_path: Path
) -> None:
    folder = make_family_folder(tmp_path, case)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(LoadError, match=error):
        read_config(folder)


def test_every_class_of_transformers_is_served_or_the_guide_says_why_not() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "models.md").read_text()
    section = guide.partition("### Not served\n")[2].partition("###")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("|")]
    of_all = {
        name
        for each in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        for name in ([each] if isinstance(each, str) else each)
    }
    ends = "(ForCausalLM|WithLMHeadModel|LMHeadModel|ModelWithLMHead|ForConditionalGeneration|Decoder)$"
    assert sorted(re.findall("`(.+?)`", "".join(rows))) == sorted(
        {re.sub(ends, "", name) for name in of_all - {*FAMILIES}}
    )
    assert f"has {len(of_all)} classes" in section


def test_a_family_that_transformers_saved_as_llama_is_still_that_family(tmp_path: Path) -> None:
    folder = make_family_folder(tmp_path / "own", "internlm3")
    hf_model(folder).save_pretrained(tmp_path / "again")
    names = json.loads((tmp_path / "again" / "config.json").read_text())["architectures"]
    assert names == ["LlamaForCausalLM"]
    assert read_config(tmp_path / "again") == read_config(folder)


@pytest.mark.parametrize("case", ["gemma3", "gemma4"])
def test_a_base_for_all_layers_means_nothing_where_each_kind_of_layer_has_one(
    case: str, tmp_path: Path
) -> None:
    """GPTQModel writes one. transformers reads the sections alone."""
    folder = make_family_folder(tmp_path, case)
    plain, file = read_config(folder), folder / "config.json"
    written = json.loads(file.read_text())
    written["rope_parameters"] |= {"rope_type": "default", "rope_theta": {"global": 1e6, "local": 1e4}}
    file.write_text(json.dumps(written))
    assert read_config(folder) == plain


def test_every_case_is_of_a_family_that_is_served() -> None:
    assert {kind for kind, _ in CASES.values()} <= {*MODEL_TYPES}


@pytest.mark.parametrize("case", ["helium", "gemma2", "arcee"])
def test_a_block_that_the_whole_decoder_in_one_call_lacks_runs_layer_by_layer(
    case: str, tmp_path: Path
) -> None:
    folder = make_family_folder(tmp_path, case)
    decoder = load_model(folder, device=torch.device("cpu"), dtype="bfloat16")
    assert decoder._fused is None
    tokens = [*range(30, 60)]
    truth = hf_logits(hf_model(folder), tokens)
    hidden, _ = PagedSequences(decoder).forward({"a": tokens})
    errors = sorted(map(relative_error, decoder.logits(hidden), truth))
    assert errors[len(errors) // 2] < 0.1


def test_a_family_of_usual_blocks_runs_in_one_call_where_there_is_one(tmp_path: Path) -> None:
    fused = [
        load_model(folder, device=torch.device("cpu"), dtype="bfloat16")._fused is not None
        for folder in (model_folder("llama"), make_family_folder(tmp_path, "seed_oss"))
    ]
    assert fused[0] == fused[1]
