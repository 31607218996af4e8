"""Each key of a GGUF file is read, means nothing, or stops the load with its name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from gguf_files import write_gguf
from hf import hf_logits, hf_model, relative_error
from paged import PagedSequences
from tiny_models import VOCAB, make_model_folder

from personae.engine.checkpoints import open_checkpoint
from personae.engine.generation_config import GenerationDefaults
from personae.engine.loader import load_model
from personae.errors import ModelLoadError

PROMPT = [(place * 37 + 11) % VOCAB for place in range(90)]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA = {
    "num_hidden_layers": 7,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 32,
    "tie_word_embeddings": True,
    "rope_theta": 1000000.0,
}
STRETCHED = {"rope_scaling": YARN}
OLLAMA = {"rope.global.freq_base": 1e6, "rope.local.freq_base": 1e4}
LINEAR = {"rope_scaling": {"type": "linear", "factor": 4.0}}


def add(values: dict[str, Any]) -> Callable[[GGUFWriter], None]:
    """Adds these fields to a file."""

    def change(writer: GGUFWriter) -> None:
        for key, value in values.items():
            kinds = {
                bool: writer.add_bool,
                int: writer.add_int32,
                float: writer.add_float32,
                str: writer.add_string,
            }
            kinds.get(type(value), writer.add_array)(key, value)

    return change


@pytest.mark.parametrize(
    ("family", "written", "meant", "values"),
    [
        ("qwen3", STRETCHED, {"attention_factor": 1.0}, {"rope.scaling.yarn_attn_factor": 1.0}),
        ("qwen3", STRETCHED, {"attention_factor": 1.3}, {"rope.scaling.attn_factor": 1.3}),
        (
            "qwen3",
            STRETCHED,
            {"mscale": 1.0, "mscale_all_dim": 1.0},
            {"rope.scaling.yarn_log_multiplier": 1.0},
        ),
        (
            "qwen3",
            STRETCHED,
            {"mscale": 1.0, "mscale_all_dim": 0.5},
            {"rope.scaling.yarn_log_multiplier": 0.5},
        ),
        ("qwen3", STRETCHED, {"beta_fast": 20.0}, {"rope.scaling.yarn_beta_fast": 20.0}),
        ("qwen3", STRETCHED, {}, {"rope.scaling.yarn_ext_factor": 1.0}),
        ("llama", {}, LINEAR, {"rope.scaling.factor": 4.0}),
        ("llama", {}, LINEAR, {"rope.scale_linear": 4.0}),
        ("llama", {}, {}, {"rope.scaling.factor": 1.0}),
        ("llama", {}, {}, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
        ("llama", {}, {}, {"attention.causal": True}),
        ("llama", {}, {}, {"pooling_type": int(gguf.PoolingType.LAST)}),
        ("llama", {}, {}, {"rope.scaling.finetuned": True}),
        ("gemma3", {**GEMMA, "rope_theta": None}, GEMMA, OLLAMA),
        ("gemma3", {**GEMMA, "rope_theta": None}, GEMMA, {}),
    ],
)
def test_a_file_is_computed_as_transformers_computes_the_folder_that_it_means(
    family: str,
    written: dict[str, Any],
    meant: dict[str, Any],
    values: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if written.get("rope_theta", 1) is None:
        monkeypatch.setattr(GGUFWriter, "add_rope_freq_base", lambda writer, base: None)
    if "rope_scaling" in written and "rope_scaling" not in meant:
        meant = {"rope_scaling": {**written["rope_scaling"], **meant}}
    folder = make_model_folder(tmp_path / "written", family, **written)
    truth = make_model_folder(tmp_path / "meant", family, **{**written, **meant})
    change = add({f"{family}.{key}": value for key, value in values.items()})
    file = write_gguf(tmp_path / "a.gguf", folder, Type.F32, change=change)
    decoder = load_model(file, device=torch.device("cpu"), dtype="float32")
    found = decoder.logits(PagedSequences(decoder, page_size=8).forward({"a": PROMPT})[0])
    assert relative_error(found, hf_logits(hf_model(truth), PROMPT)) < 1e-4


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.causal", False),
        ("attention.sliding_window", 64),
        ("attention.temperature_scale", 0.1),
        ("rope.freq_base_swa", 1e4),
        ("rope.scaling.alpha", 2.0),
        ("rope.scaling.attn_factor", 1.3),
        ("rope.scaling.yarn_ext_factor", 0.5),
        ("rope.dimension_sections", [1, 2, 3, 0]),
        ("pooling_type", int(gguf.PoolingType.CLS)),
        ("mystery", 1.0),
    ],
)
def test_a_key_that_would_be_ignored_stops_the_load(key: str, value: Any, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "folder")
    file = write_gguf(tmp_path / "a.gguf", folder, change=add({f"llama.{key}": value}))
    with pytest.raises(ModelLoadError, match=rf"^a\.gguf: llama\.{key}: "):
        open_checkpoint(file).config()


def sampling(folder: Path, **values: float) -> GenerationDefaults:
    """What a file says that recommends this."""
    change = add({f"general.sampling.{name}": value for name, value in values.items()})
    file = write_gguf(folder / "a.gguf", make_model_folder(folder / "model"), change=change)
    return open_checkpoint(file).generation_defaults(VOCAB)


def test_recommended_sampling_is_read(tmp_path: Path) -> None:
    found = sampling(tmp_path, temp=0.5, top_p=0.75, top_k=20, min_p=0.25, penalty_repeat=1.5)
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.5, 0.75, 20, 0.25)
    assert found.repetition_penalty == 1.5


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"penalty_repeat": 1.5, "penalty_last_n": 64}, "penalty_last_n"),
        ({"xtc_probability": 0.5}, "XTC"),
        ({"mirostat": 2}, "Mirostat"),
        ({"mystery": 0.5}, "mystery"),
    ],
)
def test_recommended_sampling_that_would_be_ignored_stops_the_load(
    values: dict[str, float], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        sampling(tmp_path, **values)


def test_samplers_that_are_off_mean_nothing(tmp_path: Path) -> None:
    off = {"xtc_probability": 0.0, "xtc_threshold": 0.1, "mirostat": 0, "mirostat_tau": 5.0}
    assert sampling(tmp_path, **off, penalty_last_n=64).temperature is None
