"""An adapter folder as PEFT writes it is applied exactly as PEFT applies it."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from corrupt_adapters import BASE, Q_A, SHAPES, edit_tensors
from peft import PeftModel, get_peft_model_state_dict
from tiny_adapters import ZOO, make_adapter, make_adapter_folder, set_config
from transformers import AutoModelForCausalLM

from personae.lora.peft import read_adapter
from personae.lora.peft_names import CONFIG_FILE
from personae.lora.sites import PROJECTIONS


@pytest.mark.parametrize("name", ZOO)
def test_every_update_is_the_one_that_peft_computes(name: str, tmp_path: Path) -> None:
    model = make_adapter(BASE, **ZOO[name])
    adapter = read_adapter(make_adapter_folder(tmp_path / name, BASE, **ZOO[name]), SHAPES)
    assert adapter.name == name
    compared = 0
    for layer in range(SHAPES.layers):
        for module, projection in PROJECTIONS.items():
            linear = model.get_submodule(f"base_model.model.model.layers.{layer}.{projection}")
            pair = adapter.pairs.get((layer, module))
            assert (pair is not None) == hasattr(linear, "get_delta_weight")
            if pair is not None:
                delta = linear.get_delta_weight("default")
                torch.testing.assert_close((pair.a.T @ pair.b).T * pair.scaling, delta, atol=1e-5, rtol=1e-5)
                assert pair.rank == linear.r["default"] <= adapter.ranks[module]
                compared += 1
    assert compared == len(adapter.pairs) == len(get_peft_model_state_dict(model)) // 2


def test_names_with_the_adapter_s_name_in_them_mean_the_same(folder: Path) -> None:
    plain = read_adapter(folder, SHAPES)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[key.replace(".weight", ".default.weight")] = tensors.pop(key)

    edit_tensors(folder, rename)
    assert read_adapter(folder, SHAPES).digest == plain.digest


@pytest.mark.parametrize("root", ["model.language_model.", "language_model.model."])
def test_names_of_a_base_that_reads_images_too_mean_the_same(root: str, folder: Path) -> None:
    set_config(folder, alpha_pattern={"model.layers.1.self_attn.q_proj": 3})
    plain = read_adapter(folder, SHAPES)
    set_config(folder, alpha_pattern={f"{root}layers.1.self_attn.q_proj": 3})
    assert read_adapter(folder, SHAPES).digest != plain.digest

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            name = key.removeprefix("base_model.model.model.")
            tensors[f"base_model.model.{root}{name}"] = tensors.pop(key)

    edit_tensors(folder, rename)
    assert read_adapter(folder, SHAPES).digest == plain.digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_float_tensors_keep_the_dtype_of_their_file(dtype: torch.dtype, tmp_path: Path) -> None:
    adapter = read_adapter(make_adapter_folder(tmp_path / "a", BASE, dtype=dtype), SHAPES)
    assert {half.dtype for pair in adapter.pairs.values() for half in (pair.a, pair.b)} == {dtype}
    assert adapter.nbytes == sum(p.a.nbytes + p.b.nbytes for p in adapter.pairs.values())


def test_float8_is_read_as_peft_reads_it(folder: Path) -> None:
    edit_tensors(
        folder, lambda tensors: tensors.update({k: t.to(torch.float8_e4m3fn) for k, t in tensors.items()})
    )
    adapter = read_adapter(folder, SHAPES)
    assert {half.dtype for pair in adapter.pairs.values() for half in (pair.a, pair.b)} == {torch.bfloat16}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns of its own properties when PEFT walks over them
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_config(BASE), folder)
    for (layer, module), pair in adapter.pairs.items():
        linear = model.get_submodule(f"base_model.model.model.layers.{layer}.{PROJECTIONS[module]}")
        assert linear.lora_A["default"].weight.dtype == torch.float32
        torch.testing.assert_close(pair.a.float(), linear.lora_A["default"].weight.detach(), atol=0, rtol=0)
        torch.testing.assert_close(pair.b.T.float(), linear.lora_B["default"].weight.detach(), atol=0, rtol=0)
    assert len(adapter.pairs) == 4


def test_the_digest_is_of_the_content_and_not_of_the_name(folder: Path) -> None:
    digest = read_adapter(folder, SHAPES).digest
    assert len(digest) == 64
    set_config(folder, base_model_name_or_path="elsewhere", lora_dropout=0.5, inference_mode=False)
    assert read_adapter(folder.rename(folder.with_name("other")), SHAPES).digest == digest


@pytest.mark.parametrize(
    "change", [{"lora_alpha": 9}, {"use_rslora": True}, {"alpha_pattern": {"v_proj": 1}}], ids=str
)
def test_the_digest_changes_with_the_scaling(folder: Path, change: dict[str, Any]) -> None:
    digest = read_adapter(folder, SHAPES).digest
    set_config(folder, **change)
    assert read_adapter(folder, SHAPES).digest != digest


def test_the_digest_changes_with_one_value_and_with_the_dtype(folder: Path) -> None:
    digests = {read_adapter(folder, SHAPES).digest}
    edit_tensors(folder, lambda tensors: tensors[Q_A][0, 0].add_(1e-3))
    digests.add(read_adapter(folder, SHAPES).digest)
    edit_tensors(folder, lambda tensors: tensors.update({k: t.bfloat16() for k, t in tensors.items()}))
    digests.add(read_adapter(folder, SHAPES).digest)
    assert len(digests) == 3


def test_the_config_of_an_older_peft_takes_peft_s_defaults(folder: Path) -> None:
    fields = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / CONFIG_FILE).write_text(json.dumps(fields))
    assert {pair.scaling for pair in read_adapter(folder, SHAPES).pairs.values()} == {4.0}
    del fields["lora_alpha"]
    (folder / CONFIG_FILE).write_text(json.dumps(fields))
    assert {pair.scaling for pair in read_adapter(folder, SHAPES).pairs.values()} == {2.0}


@pytest.mark.parametrize(
    "harmless",
    [
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"corda_config": {"corda_method": "ipm"}, "loftq_config": {"loftq_bits": 4}},
        {"layers_to_transform": [0, 1], "layers_pattern": "layers", "exclude_modules": ["lm_head"]},
        {"some_future_field": None, "another": False, "third": {}, "fourth": []},
        {"task_type": None, "megatron_core": "megatron.core", "revision": "main"},
    ],
    ids=str,
)
def test_fields_without_effect_are_accepted(folder: Path, harmless: dict[str, Any]) -> None:
    set_config(folder, **harmless)
    assert read_adapter(folder, SHAPES).ranks == {"q": 4, "v": 4}
