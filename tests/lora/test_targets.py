"""An adapter has LoRA on the modules that PEFT puts it on, and on no others."""

import dataclasses
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_adapters import lora_shapes, make_adapter_folder, set_config, tiny_config
from transformers import LlamaForCausalLM

from personae.errors import AdapterError
from personae.lora.patterns import NamePattern
from personae.lora.peft import read_adapter
from personae.lora.peft_names import TENSORS_FILE
from personae.lora.targets import Targets

BASE = tiny_config(num_hidden_layers=3)
SHAPES = lora_shapes(BASE)
UNSLOTH = (
    r"(?:.*?(?:vision|image|visual|patch_embed|language|text).*?(?:self_attn|attention|attn|mlp|feed_forward"
    r"|ffn|dense).*?(?:q_proj|v_proj|down_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp"
    r"|feed_forward|ffn|dense)\.(?:(?:q_proj|v_proj|down_proj)))"
)
CONFIGS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj"]},
    {"target_modules": ["proj", "v_proj"]},
    {"target_modules": ["self_attn.k_proj", "model.layers.1.mlp.up_proj", "embed_tokens", "lm_head"]},
    {"target_modules": "all-linear"},
    {"target_modules": "ALL-LINEAR", "exclude_modules": ["down_proj"]},
    {"target_modules": r"model\.layers\.\d+\.self_attn\.(q_proj|v_proj)|lm_head"},
    {"target_modules": r".*\.[02]\.mlp\..*_proj"},
    {"target_modules": r"^(model(?=\.).*\.(o_proj|up_proj))$"},
    {"target_modules": r"(?!.*(mlp|lm_head)).*_proj"},
    {"target_modules": UNSLOTH},
    {"target_modules": ["q_proj", "up_proj"], "exclude_modules": ["layers.1.mlp.up_proj", "0.q_proj"]},
    {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*\.1\.(mlp|self_attn)\.up_proj"},
    {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": [0, 2]},
    {"target_modules": ["q_proj"], "layers_to_transform": 1},
    {"target_modules": ["q_proj"], "layers_to_transform": []},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "model.layers"]},
    {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head"]},
]


@pytest.mark.parametrize("fields", CONFIGS, ids=lambda fields: str(fields)[:60])
def test_modules_are_chosen_as_peft_chooses_them(fields: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the config leaves unmatched
        model = get_peft_model(LlamaForCausalLM(BASE), LoraConfig(r=2, **fields))
    with_lora = {
        name.removeprefix("base_model.model.")
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }
    ends = ("_proj", "embed_tokens", "lm_head")
    names = [name for name, _ in LlamaForCausalLM(BASE).named_modules() if name.endswith(ends)]
    targets = Targets(fields, frozenset(fields.get("modules_to_save", ())))
    assert {name for name in names if targets.missed_by(name) is None} == with_lora != set()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters") / "made"
    return make_adapter_folder(path, BASE, rank=4, targets=("q_proj", "v_proj"))


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "made"))


@pytest.mark.parametrize(
    ("fields", "tensor", "field"),
    [
        ({"target_modules": ["q_proj"]}, "0.self_attn.v_proj", "target_modules"),
        ({"target_modules": ["foo_proj"]}, "0.self_attn.q_proj", "target_modules"),
        ({"target_modules": []}, "0.self_attn.q_proj", "target_modules"),
        ({"target_modules": ".*q_proj"}, "0.self_attn.v_proj", "target_modules"),
        ({"exclude_modules": ["1.self_attn.q_proj"]}, "1.self_attn.q_proj", "exclude_modules"),
        ({"layers_to_transform": [0, 1]}, "2.self_attn.q_proj", "layers_to_transform"),
    ],
    ids=str,
)
def test_a_tensor_that_peft_would_not_apply_is_refused_with_the_field_that_leaves_it_out(
    folder: Path, fields: dict[str, Any], tensor: str, field: str
) -> None:
    set_config(folder, **fields)
    with pytest.raises(AdapterError, match=f"the config's {field} excludes") as refused:
        read_adapter(folder, SHAPES)
    assert tensor in (refused.value.param or "")


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": "q_proj", "layers_to_transform": [0]},
        {"target_modules": ["q_proj"], "layers_pattern": "layers"},
        {"target_modules": ["q_proj", 3]},
        {"target_modules": "(q_proj"},
        {"target_modules": "(.*"},
        {"target_modules": "q" * 3000},
        {"exclude_modules": 3},
        {"layers_to_transform": ["0"]},
        {"layers_to_transform": [0], "layers_pattern": "(a+)+"},
    ],
    ids=lambda fields: str(fields)[:60],
)
def test_fields_that_make_no_sense_are_refused_by_name(folder: Path, fields: dict[str, Any]) -> None:
    set_config(folder, **fields)
    with pytest.raises(AdapterError) as refused:
        read_adapter(folder, SHAPES)
    assert refused.value.param == [*fields][-1]


def test_an_expression_that_takes_too_long_is_refused_by_the_field(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(self: NamePattern, name: str) -> bool:
        raise AdapterError("it takes too long to match")

    monkeypatch.setattr(NamePattern, "matches_whole", slow)
    set_config(folder, target_modules=".*_proj")
    with pytest.raises(AdapterError, match="too long") as refused:
        read_adapter(folder, SHAPES)
    assert refused.value.param == "target_modules"


def test_without_target_modules_whatever_has_tensors_was_chosen(folder: Path) -> None:
    set_config(folder, target_modules=None)
    assert {*read_adapter(folder, SHAPES).ranks} == {"q", "v"}


def test_modules_of_which_the_file_has_nothing_do_nothing_as_in_peft(folder: Path) -> None:
    """PEFT warns, and leaves them as they begin: without effect."""
    tensors = load_file(folder / TENSORS_FILE)
    save_file({name: value for name, value in tensors.items() if ".1." not in name}, folder / TENSORS_FILE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(LlamaForCausalLM(BASE), folder)
    pairs = read_adapter(folder, SHAPES).pairs
    for layer in range(3):
        linear = model.get_submodule(f"base_model.model.model.layers.{layer}.self_attn.q_proj")
        delta = linear.get_delta_weight("default")
        pair = pairs.get((layer, "q"))
        ours = torch.zeros_like(delta) if pair is None else (pair.a.T @ pair.b).T * pair.scaling
        torch.testing.assert_close(ours, delta, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"targets": "all-linear"},
        {"targets": UNSLOTH},
        {"targets": ("q_proj", "embed_tokens"), "ensure_weight_tying": True},
        {"targets": ("q_proj", "lm_head"), "use_dora": True},
        {"targets": ("q_proj", "embed_tokens"), "modules_to_save": ["lm_head"]},
        {"targets": ("q_proj",), "trainable_token_indices": [3, 5]},
        {"targets": ("q_proj",), "alora_invocation_tokens": [3, 5]},
        {"targets": ("q_proj", "down_proj"), "layers": (1,), "layers_pattern": "layers"},
    ],
    ids=lambda options: str(options)[:60],
)
def test_what_peft_saves_is_accepted(options: dict[str, Any], tmp_path: Path) -> None:
    shapes = dataclasses.replace(SHAPES, vocabulary=(BASE.vocab_size, BASE.hidden_size))
    base = tiny_config(num_hidden_layers=3, tie_word_embeddings="ensure_weight_tying" in options)
    path = make_adapter_folder(tmp_path / "a", base, rank=2, **options)
    tensors = load_file(path / TENSORS_FILE)
    own = {name: value for name, value in tensors.items() if "base_layer" not in name}  # copies of the base's
    save_file(own, path / TENSORS_FILE)
    assert read_adapter(path, shapes).ranks
