"""An MTP layer comes from the served model's own files or from a folder of its own. What does not fit is
refused in a sentence."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_adapters import make_adapter_folder
from tiny_heads import config_of, make_head_folder, write_head
from tiny_models import make_model_folder, model_folder, write_json
from tiny_mtp import LAYER, make_mtp_folder

from personae.actors.draft_model import load_draft_model
from personae.actors.options import OWN_MTP, EngineOptions
from personae.actors.sizing import choose_sizes
from personae.engine.heads.eagle3 import Eagle3Head
from personae.engine.heads.head import Head
from personae.engine.heads.loader import is_head
from personae.engine.heads.mtp import MtpHead
from personae.engine.loader import load_model
from personae.engine.lora_shapes import lora_shapes
from personae.engine.models.decoder import Decoder
from personae.engine.tokens import Tokenizer
from personae.errors import AdapterError, ModelLoadError
from personae.lora.peft import read_adapter

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def mimo() -> Path:
    return model_folder("mimo")


@pytest.fixture(scope="module")
def served(mimo: Path) -> Decoder:
    return load_model(mimo, device=CPU, dtype="float32")


def loaded(model: Path, served: Decoder, draft: Path, **changes: Any) -> Decoder | Head | None:
    options = EngineOptions(model, dtype="float32", speculate="draft", draft_model=draft, **changes)
    return load_draft_model(options, served, partial(Tokenizer.load, model), CPU)


def refusal(model: Path, served: Decoder, draft: Path) -> str:
    with pytest.raises(ModelLoadError) as refused:
        loaded(model, served, draft)
    assert refused.value.message.startswith(f"--draft-model {draft}: ")
    return refused.value.message.removeprefix(f"--draft-model {draft}: ")


def weights_of(head: Decoder | Head | None) -> dict[str, torch.Tensor]:
    assert isinstance(head, MtpHead)
    return {
        "input": head.input.plain(),
        **{str(number): linear.plain() for number, linear in enumerate(head.layer.linears())},
        **{f"norm {number}": norm.weight for number, norm in enumerate(head.norms())},
    }


def test_the_layer_comes_from_the_served_model_from_another_model_or_from_a_folder_of_its_own(
    mimo: Path, served: Decoder, tmp_path: Path
) -> None:
    tensors = load_file(mimo / "model.safetensors")
    alone = {name: tensor for name, tensor in tensors.items() if name.startswith(LAYER)}
    assert len(alone) == 16  # as the makers' checkpoint has
    folder = write_head(tmp_path / "alone", config_of(mimo), alone)
    copied = shutil.copytree(mimo, tmp_path / "copy")
    for draft in (OWN_MTP, mimo, copied, folder):
        found = weights_of(loaded(mimo, served, draft))
        assert found["input"].equal(tensors[f"{LAYER}input_proj.weight"])
        assert found["1"].equal(tensors[f"{LAYER}self_attn.o_proj.weight"])
        assert found["norm 0"].equal(tensors[f"{LAYER}hidden_layernorm.weight"])
        assert found["norm 2"].equal(tensors[f"{LAYER}final_layernorm.weight"])


def test_a_model_with_mtp_layers_is_served_without_them_unless_they_are_asked_for(mimo: Path) -> None:
    options = EngineOptions(mimo, dtype="float32")
    model = load_model(mimo, device=CPU, dtype="float32")
    assert not any("mtp" in name for name, _ in model.tensors())
    assert load_draft_model(options, model, partial(Tokenizer.load, mimo), CPU) is None


def test_a_model_without_an_mtp_layer_says_so_when_it_is_asked_for(tmp_path: Path) -> None:
    llama = model_folder("llama")
    model = load_model(llama, device=CPU, dtype="float32")
    said = "The served model's files name no MTP layer (num_nextn_predict_layers in config.json)."
    assert refusal(llama, model, OWN_MTP) == said
    none = make_model_folder(tmp_path, "mimo", num_nextn_predict_layers=0)
    assert refusal(none, load_model(none, device=CPU, dtype="float32"), OWN_MTP) == said


def test_a_copy_that_lost_the_layer_is_told_from_a_model_that_never_had_one(
    mimo: Path, served: Decoder, tmp_path: Path
) -> None:
    tensors = load_file(mimo / "model.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(LAYER)}
    copied = shutil.copytree(mimo, tmp_path / "copy")
    write_head(copied, config_of(mimo), rest)
    assert "The weights have no tensors model.mtp_layers.0.…, although config.json has" in refusal(
        mimo, served, copied
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 32}, "hidden states of width 32; the served model has 64."),
        ({"vocab_size": 300}, "a vocabulary of 300; the served model has 512."),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers: one layer is supported, not 2"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers: must be at least 0, found -1"),
        ({"num_nextn_predict_layers": "1"}, 'num_nextn_predict_layers: expected int, found "1"'),
        (
            {"architectures": ["DeepseekV3ForCausalLM"]},
            'the MTP layers of ["DeepseekV3ForCausalLM"] are not supported, only MiMoForCausalLM',
        ),
        ({"architectures": None}, "architectures: the MTP layers of null are not supported"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide 4 attention heads"),
        ({"hidden_act": "relu"}, 'hidden_act: "relu" is not supported'),
        ({"intermediate_size": 80}, "mis-shaped: model.mtp_layers.0.mlp.gate_proj.weight (expected [80, 64]"),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_is_refused_by_field(
    mimo: Path, served: Decoder, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    folder = shutil.copytree(mimo, tmp_path / "changed")
    write_json(folder / "config.json", {**config_of(folder), **changes})
    assert said in refusal(mimo, served, folder)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"input_proj.weight": None}, "Tensors missing: model.mtp_layers.0.input_proj.weight"),
        (
            {"embed_tokens.weight": torch.ones(2)},
            "Tensors unexpected: model.mtp_layers.0.embed_tokens.weight",
        ),
        (
            {"final_layernorm.weight": torch.ones(32)},
            "Tensors mis-shaped: model.mtp_layers.0.final_layernorm.weight (expected [64], found [32])",
        ),
        (
            {"mlp.up_proj.weight": torch.ones(96, 64, dtype=torch.int32)},
            "of an unsupported dtype: model.mtp_",
        ),
    ],
    ids=str,
)
def test_tensors_that_do_not_fit_are_named(
    mimo: Path, served: Decoder, tmp_path: Path, tensors: dict[str, torch.Tensor | None], said: str
) -> None:
    folder = make_mtp_folder(tmp_path, mimo, intermediate_size=96, head_dim=24)
    every = {
        **load_file(folder / "model.safetensors"),
        **{LAYER + name: tensor for name, tensor in tensors.items()},
    }
    kept = {name: tensor for name, tensor in every.items() if tensor is not None}
    write_head(folder, config_of(folder), kept)
    assert said in refusal(mimo, served, folder)


def test_a_layer_with_other_tokens_is_refused(mimo: Path, served: Decoder, tmp_path: Path) -> None:
    folder = shutil.copytree(mimo, tmp_path / "other")
    words = json.loads((folder / "tokenizer.json").read_text())
    vocab = words["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    write_json(folder / "tokenizer.json", words)
    assert "This model has other tokens than the served one" in refusal(mimo, served, folder)


def test_an_eagle_head_of_a_model_with_mtp_layers_stays_an_eagle_head(
    mimo: Path, served: Decoder, tmp_path: Path
) -> None:
    folder = make_head_folder(tmp_path, mimo, num_nextn_predict_layers=1)
    assert is_head(folder)
    assert isinstance(loaded(mimo, served, folder), Eagle3Head)


def test_lora_on_the_layer_is_refused_by_the_tensors_name(
    mimo: Path, served: Decoder, tmp_path: Path
) -> None:
    folder = make_adapter_folder(tmp_path, mimo, rank=4, targets=("q_proj",))
    shapes = lora_shapes(served)
    assert read_adapter(folder, shapes).rank == 4
    file = folder / "adapter_model.safetensors"
    added = {f"base_model.model.{LAYER}self_attn.q_proj.lora_A.weight": torch.zeros(4, 64)}
    save_file({**load_file(file), **added}, file)
    with pytest.raises(AdapterError, match=r"mtp_layers\.0\.self_attn\.q_proj\.lora_A\.weight"):
        read_adapter(folder, shapes)


def test_a_quantized_layer_computes_nearly_the_same(mimo: Path, served: Decoder) -> None:
    exact, rounded = (weights_of(loaded(mimo, served, OWN_MTP, quantize=way)) for way in (None, "int8"))
    for name, weight in exact.items():
        apart = (rounded[name] - weight).abs().max() / weight.abs().max()
        assert (apart == 0) if name.startswith("norm") else (0 < apart < 0.01)


def test_the_pages_of_the_model_and_the_layer_fit_into_the_memory_of_the_cache(
    mimo: Path, served: Decoder
) -> None:
    head = loaded(mimo, served, OWN_MTP)
    asked = EngineOptions(mimo, dtype="float32", kv_memory=2**26)
    alone, both = (
        choose_sizes(asked, served, lora_shapes(served), (), each, device=served.device)
        for each in (None, head)
    )
    token = 3 * 2 * 2 * 24  # numbers that the model keeps of each token: keys and values of three layers
    more = 2 * 2 * 24 + 64  # the layer's keys and values, and the hidden state
    assert both.layout.num_pages == pytest.approx(alone.layout.num_pages * token / (token + more), rel=0.01)
