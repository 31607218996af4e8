"""Families whose GGUF files llama.cpp's own converter describes: its metadata is recorded, see
`gguf_conversion`."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_conversion
import pytest
import torch
from family_models import make_family_folder
from gguf_conversion import CASES, RECORDED, folder_of, write_recorded
from hf import hf_logits, hf_model, relative_error
from paged import PagedSequences
from tiny_adapters import make_adapter_folder
from tiny_models import VOCAB

from personae.engine.loader import load_model
from personae.engine.lora_shapes import lora_shapes
from personae.errors import AdapterError, ModelLoadError
from personae.kernels.registry import optional
from personae.lora.peft import read_adapter

CPU = torch.device("cpu")
PROMPT = random.Random(5).choices(range(VOCAB), k=60)


@pytest.mark.parametrize("case", CASES)
def test_a_family_has_the_logits_of_transformers_own_reading(case: str, tmp_path: Path) -> None:
    folder = folder_of(case, tmp_path / "folder")
    decoder = load_model(write_recorded(tmp_path / "model.gguf", folder, case), device=CPU, dtype="float32")
    hidden, _ = PagedSequences(decoder, page_size=8).forward({"a": PROMPT})
    truth = hf_logits(hf_model(folder), PROMPT)
    assert max(map(relative_error, decoder.logits(hidden).clone(), truth)) < 1e-4


def test_an_adapter_for_a_file_with_scales_inside_its_weights_is_refused(tmp_path: Path) -> None:
    folder = folder_of("falcon_h1", tmp_path / "folder")
    adapter = make_adapter_folder(tmp_path / "adapter", folder, targets=["q_proj"])
    read_adapter(adapter, lora_shapes(load_model(folder, device=CPU)))
    file = write_recorded(tmp_path / "model.gguf", folder, "falcon_h1")
    with pytest.raises(
        AdapterError, match=r"scales are inside its weights .* serve the base from its folder"
    ):
        read_adapter(adapter, lora_shapes(load_model(file, device=CPU)))


@pytest.mark.parametrize("case", ["gemma3n", "gemma4"])
def test_embeddings_for_each_layer_stay_in_the_files_bits(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, size = json.loads(RECORDED.read_text()), 32  # a block of Q8_0
    _set(f"{case}.embedding_length_per_layer_input", size)(recorded[case])
    (tmp_path / "changed.json").write_text(json.dumps(recorded))
    monkeypatch.setattr(gguf_conversion, "RECORDED", tmp_path / "changed.json")
    sizes = {**CASES[case], "hidden_size_per_layer_input": size}
    folder = make_family_folder(tmp_path / "folder", case, **sizes)
    tables = ("token_embd.weight", "per_layer_token_embd.weight")
    file = write_recorded(tmp_path / "a.gguf", folder, case, in_q8_0=tables)
    kept, plain = load_model(file, device=CPU), load_model(file, device=CPU, dtype="bfloat16")
    assert kept.per_layer is not None
    assert plain.per_layer is not None
    in_bits = optional("lookup", CPU, torch.bfloat16) is not None
    assert (kept.per_layer.table.in_bits, kept.embedding.in_bits) == (in_bits, in_bits)
    assert (kept.weight_bytes < plain.weight_bytes) == in_bits
    tokens = torch.arange(500).flip(0)
    assert torch.equal(kept.per_layer.table(tokens), plain.per_layer.table(tokens))
    assert torch.equal(kept.per_layer.table.plain(), plain.per_layer.table.plain())
    found, meant = (
        decoder.logits(PagedSequences(decoder).forward({"a": PROMPT})[0]).clone() for decoder in (kept, plain)
    )
    errors = [*map(relative_error, found, meant)]  # the output matrix' inputs are rounded to 8 bits
    assert sum(errors) / len(errors) < 0.05


def _set(key: str, value: Any, kind: str = "UINT32") -> Callable[[dict[str, Any]], None]:
    def change(fields: dict[str, Any]) -> None:
        fields[key] = [["ARRAY", kind] if isinstance(value, list) else [kind], value]

    return change


@pytest.mark.parametrize(
    ("case", "change", "error"),
    [
        (
            "gemma4",
            _set("gemma4.feed_forward_length", [96, 96, 96, 96, 96, 100]),
            "feed_forward_length: sizes that differ otherwise",
        ),
        (
            "gemma4",
            _set("gemma4.feed_forward_length", [96, 96]),
            "an integer from 0 to .* for each of 6 layers",
        ),
        ("gemma4", _set("gemma4.rope.dimension_count_swa", 8), "differs from attention.key_length_swa"),
        (
            "gemma4",
            _set("gemma4.attention.head_count_kv", [2, 2, 1, 2, 2, 2]),
            "head_count_kv: must be one number for each kind of layer",
        ),
        (
            "exaone4",
            _set("exaone4.attention.sliding_window_pattern", [True], "BOOL"),
            "expected 3 layers, found 1",
        ),
        (
            "exaone4",
            _set("exaone4.attention.sliding_window_pattern", [1, 1, 1]),
            "an array of true and false",
        ),
        ("gemma3n", _set("gemma3n.activation_sparsity_scale", [1.0], "FLOAT32"), "expected 6 numbers"),
        (
            "hunyuan_v1_moe",
            _set("hunyuan-moe.expert_shared_count", 2),
            "expert_shared_count: only 1 is supported",
        ),
        ("gemma4, experts", _set("gemma4.expert_count", 4), "_exps.weight: expected 4 experts"),
        ("llama4", _set("llama4.attention.value_length", 8), "differs from llama4.attention.key_length"),
        (
            "mellum",
            _set("mellum.attention.sliding_window_pattern", [True], "BOOL"),
            "expected 3 layers, found 1",
        ),
        (
            "granite_swa",
            _set("granite_swa.attention.rope_pattern", [True], "BOOL"),
            "expected 3 layers, found 1",
        ),
        (
            "hy_v3",
            _set("hy_v3.expert_shared_feed_forward_length", 33),
            "33 is not a multiple of the 32 of an expert",
        ),
        ("minicpm3", _set("minicpm3.rope.dimension_count", 20), "rope.dimension_count: 20 of 20"),
        ("falcon_h1", _set("falcon-h1.ssm.inner_size", 97), "97 is not a multiple of 8 heads"),
        ("minimax_m2", _set("minimax-m2.expert_gating_func", 1), "expert_gating_func: only 2 is supported"),
    ],
)
def test_metadata_that_does_not_fit_is_refused_by_name(
    case: str,
    change: Callable[[dict[str, Any]], None],
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = json.loads(RECORDED.read_text())
    change(recorded[case])
    (tmp_path / "changed.json").write_text(json.dumps(recorded))
    monkeypatch.setattr(gguf_conversion, "RECORDED", tmp_path / "changed.json")
    file = write_recorded(tmp_path / "model.gguf", folder_of(case, tmp_path / "folder"), case)
    with pytest.raises(ModelLoadError, match=error):
        load_model(file, device=CPU)
