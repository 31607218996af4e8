"""A head that does not belong to the served model is refused in a sentence, before anything is served."""

from pathlib import Path
from typing import Any

import pytest
import torch
from bundled import MODEL, harness, tokenizer
from engine_harness import EngineHarness
from safetensors.torch import load_file
from tiny_heads import config_of, make_head_folder, write_head
from tiny_models import model_folder

from personae.actors.draft_model import load_draft_model
from personae.actors.options import EngineOptions
from personae.actors.sizing import choose_sizes
from personae.engine.heads.eagle3 import Eagle3Head
from personae.engine.heads.head import Head
from personae.engine.heads.loader import is_head
from personae.engine.models.decoder import Decoder
from personae.errors import ModelLoadError


@pytest.fixture(scope="module")
def served() -> Decoder:
    return harness().ranks[0].model


def loaded(folder: Path, served: Decoder) -> Decoder | Head | None:
    options = EngineOptions(MODEL, dtype="float32", speculate="draft", draft_model=folder)
    return load_draft_model(options, served, tokenizer, torch.device("cpu"))


def refusal(folder: Path, served: Decoder) -> str:
    with pytest.raises(ModelLoadError) as refused:
        loaded(folder, served)
    assert refused.value.message.startswith(f"--draft-model {folder}: ")
    return refused.value.message.removeprefix(f"--draft-model {folder}: ")


def test_a_head_for_another_base_is_refused_with_both_sizes(served: Decoder, tmp_path: Path) -> None:
    other = make_head_folder(tmp_path / "other", model_folder("llama"))
    assert refusal(other, served) == (
        "This head is for a model with hidden states of width 64; the served model has 256. Use a head that "
        "was trained for the served model."
    )
    words = make_head_folder(tmp_path / "words", MODEL, vocab_size=4096)
    assert "a model with a vocabulary of 4096; the served model has 2048." in refusal(words, served)
    deep = make_head_folder(tmp_path / "deep", MODEL, eagle_aux_hidden_state_layer_ids=[2, 16, 29])
    assert "reads the layers 2, 16, 29; the served model has 6 layers." in refusal(deep, served)
    default = make_head_folder(tmp_path / "default", MODEL, eagle_aux_hidden_state_layer_ids=None)
    assert "reads the layers 2, 3, 3; the served model has 6 layers." in refusal(default, served)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"architectures": ["EagleLlamaForCausalLM"], "draft_vocab_size": None},
            "of trained heads, EAGLE-3 and MiMo's MTP layer are",
        ),
        ({"architectures": ["MedusaModel"], "draft_vocab_size": None}, '"MedusaModel" is not supported'),
        ({"architectures": ["DeepSeekMTPModel"], "draft_vocab_size": None}, '"DeepSeekMTPModel" is not'),
        ({"speculators_model_type": "eagle"}, 'speculators_model_type: "eagle" is not supported'),
        ({"speculators_model_type": "eagle3"}, "transformer_layer_config: is missing"),
        ({"num_hidden_layers": 2}, "num_hidden_layers: heads of one layer are supported"),
        ({"norm_before_fc": True}, "norm_before_fc: is not supported"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide 4 attention heads"),
        ({"head_dim": 15}, "head_dim: 15 is odd"),
        ({"hidden_act": "relu"}, 'hidden_act: "relu" is not supported'),
        ({"eagle_aux_hidden_state_layer_ids": [3, 1]}, "expected layers in ascending order, found [3, 1]"),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, 'expected layers in ascending order, found "all"'),
        ({"intermediate_size": 0}, "intermediate_size: must be at least 1"),
    ],
    ids=str,
)
def test_a_config_that_would_change_the_arithmetic_is_refused_by_field(
    served: Decoder, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    folder = make_head_folder(tmp_path, MODEL)
    write_head(folder, {**config_of(folder), **changes}, load_file(folder / "model.safetensors"))
    assert is_head(folder)
    assert said in refusal(folder, served)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"fc.weight": None}, "Tensors missing: fc.weight"),
        ({"more.weight": torch.zeros(2)}, "Tensors unexpected: more.weight"),
        (
            {"norm.weight": torch.zeros(2)},
            "Tensors mis-shaped: norm.weight (expected [256], found [2])",
        ),
        ({"norm.weight": torch.zeros(256, dtype=torch.int32)}, "of an unsupported dtype: norm.weight (I32)"),
        ({"d2t": None}, "d2t is missing, which says which tokens the head guesses."),
        ({"d2t": torch.zeros(300)}, "d2t must have 300 integers, found [300] F32."),
        ({"d2t": torch.full((300,), 1900)}, "d2t names tokens outside of the vocabulary of 2048."),
    ],
    ids=str,
)
def test_tensors_that_do_not_fit_are_named(
    served: Decoder, tmp_path: Path, tensors: dict[str, torch.Tensor | None], said: str
) -> None:
    folder = make_head_folder(tmp_path, MODEL)
    every = {**load_file(folder / "model.safetensors"), **tensors}
    kept = {name: tensor for name, tensor in every.items() if tensor is not None}
    write_head(folder, config_of(folder), kept)
    assert said in refusal(folder, served)


def test_a_head_of_another_width_needs_an_embedding_of_its_own(served: Decoder, tmp_path: Path) -> None:
    base = model_folder("llama", vocab_size=2048)
    narrow = make_head_folder(tmp_path, base, target_hidden_size=256)
    tensors = load_file(narrow / "model.safetensors")
    tensors["fc.weight"] = torch.randn(64, 3 * 256) / 30
    write_head(narrow, config_of(narrow), tensors)
    assert "embed_tokens.weight is missing" in refusal(narrow, served)
    tensors["embed_tokens.weight"] = torch.randn(2048, 64)
    write_head(narrow, config_of(narrow), tensors)
    head = loaded(narrow, served)
    assert isinstance(head, Eagle3Head)
    assert head.embedding.plain().shape == (2048, 64)


def test_a_model_is_no_head() -> None:
    assert not is_head(MODEL)
    assert not is_head(Path("nowhere"))


def test_the_pages_of_the_model_and_the_head_fit_into_the_memory_of_the_cache(
    served: Decoder, tmp_path: Path
) -> None:
    made = EngineHarness(MODEL)
    head = loaded(make_head_folder(tmp_path, MODEL), served)
    assert isinstance(head, Eagle3Head)
    asked = EngineOptions(MODEL, dtype="float32", kv_memory=2**26)
    alone, both = (
        choose_sizes(asked, served, made.shapes, (), each, device=served.device) for each in (None, head)
    )
    token = 6 * 2 * 2 * 64  # numbers that the model keeps of each token: keys and values
    more = 2 * 2 * 16 + 256  # the head's keys and values, and the hidden state
    assert both.layout.num_pages == pytest.approx(alone.layout.num_pages * token / (token + more), rel=0.01)
