"""An adapter folder as PEFT writes it is applied exactly as PEFT applies it, or refused by name."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from tiny_adapters import ZOO, lora_shapes, make_adapter, make_adapter_folder, set_config, tiny_config

from personae.errors import AdapterError
from personae.lora import peft_config
from personae.lora.adapter import LoraShapes
from personae.lora.base import fingerprint
from personae.lora.peft import CONFIG_FILE, PROJECTIONS, TENSORS_FILE, read_adapter

BASE = tiny_config()
SHAPES = lora_shapes(BASE)
PREFIX = "base_model.model.model.layers"
Q_A = f"{PREFIX}.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter_folder(
        tmp_path_factory.mktemp("adapters") / "plain", BASE, rank=4, targets=("q_proj", "v_proj")
    )


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A fresh copy of the plain adapter (rank 4, q and v), to be spoilt."""
    return Path(shutil.copytree(saved, tmp_path / "plain"))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / TENSORS_FILE)
    edit(tensors)
    save_file(tensors, folder / TENSORS_FILE)


def assert_refused(folder: Path, param: str | None, reason: str, shapes: LoraShapes = SHAPES) -> None:
    with pytest.raises(AdapterError, match=reason) as refused:
        read_adapter(folder, shapes)
    assert refused.value.param == param
    if param is not None:
        assert param in refused.value.message


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


REFUSED_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "only LORA"),
    ({"peft_type": None}, "only LORA"),
    ({"use_dora": "yes"}, "true or false"),
    ({"lora_bias": True, "use_dora": True}, "no DoRA with"),
    ({"bias": "some"}, "none, lora_only, all"),
    ({"modules_to_save": ["lm_head"]}, "no weight of it"),
    ({"modules_to_save": ["norm"]}, "in full"),
    ({"trainable_token_indices": [1, 2]}, "no rows"),
    ({"trainable_token_indices": {"norm": [1]}}, "only tokens of"),
    ({"trainable_token_indices": [1, 1]}, "twice"),
    ({"trainable_token_indices": [-1]}, "from 0 on"),
    ({"alora_invocation_tokens": "hey"}, "a list of"),
    ({"use_dora": True, "alora_invocation_tokens": [1, 2]}, "activated LoRA"),
    ({"bias": "all", "alora_invocation_tokens": [1, 2]}, "activated LoRA"),
    ({"fan_in_fan_out": True}, "transposed"),
    ({"layer_replication": [[0, 1], [0, 1]]}, "replicated"),
    ({"megatron_config": {"x": 1}}, "Megatron"),
    ({"target_parameters": ["experts.gate_up_proj"]}, "bare parameters"),
    ({"use_qalora": True}, "QALoRA"),
    ({"use_bdlora": {"nblocks": 2}}, "block-diagonal"),
    ({"arrow_config": {"top_k": 2}}, "Arrow"),
    ({"kasa_config": {"beta": 1e-4}}, "KaSA"),
    ({"monteclora_config": {"num_samples": 8}}, "MonteCLoRA"),
    ({"velora_config": {"scale": 1.0}}, "VeLoRA"),
    ({"use_mystery_lora": True}, "not known here"),
    ({"task_type": "SEQ_CLS"}, "text generation"),
    ({"init_lora_weights": "pissa"}, "base weights"),
    ({"init_lora_weights": "pissa_niter_16"}, "base weights"),
    ({"init_lora_weights": "olora"}, "base weights"),
    ({"init_lora_weights": "corda"}, "base weights"),
    ({"init_lora_weights": "loftq"}, "base weights"),
    ({"init_lora_weights": "lora_ga"}, "base weights"),
    ({"init_lora_weights": ["gaussian"]}, "base weights"),
    ({"use_rslora": "false"}, "true or false"),
    ({"r": 0}, "a rank is"),
    ({"r": 4.0}, "a rank is"),
    ({"r": True}, "a rank is"),
    ({"r": 10**9}, "a rank is"),
    ({"rank_pattern": {"q_proj": "4"}}, "a rank is"),
    ({"rank_pattern": ["q_proj"]}, "object"),
    ({"rank_pattern": {"(a+)+(": 4}}, "parenthesis"),
    ({"lora_alpha": "16"}, "finite number"),
    ({"lora_alpha": math.nan}, "finite number"),
    ({"lora_alpha": math.inf}, "finite number"),
    ({"lora_alpha": 10**400}, "finite number"),
    ({"alpha_pattern": {"q_proj": None}}, "finite number"),
    ({"alpha_pattern": 3}, "object"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED_FIELDS, ids=lambda value: str(value)[:40])
def test_a_field_that_would_have_to_be_ignored_is_refused_by_name(
    folder: Path, fields: dict[str, Any], reason: str
) -> None:
    set_config(folder, **fields)
    assert_refused(folder, next(iter(fields)), reason)


def test_every_field_of_peft_s_config_is_read_of_no_effect_or_refused_with_its_own_reason() -> None:
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    known = {*peft_config.READ, *peft_config.HARMLESS, *peft_config.NEUTRAL, *peft_config.REASONS}
    assert fields <= known
    listed = (Path(__file__).resolve().parents[2] / "docs/adapters.md").read_text(encoding="utf-8")
    listed = listed.partition("### Not served")[2]
    assert [field for field in peft_config.REASONS if f"`{field}`" not in listed] == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"r": 4, "r": 8}', "twice"),
        (b"\xff\xfe{}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"r": ' + b"9" * 5000 + b"}", "not JSON"),
        (b" " * (2**20 + 1), "larger"),
        (b"{}", "only LORA"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_config_that_is_no_config_is_refused(folder: Path, text: bytes, reason: str) -> None:
    (folder / CONFIG_FILE).write_bytes(text)
    with pytest.raises(AdapterError, match=reason):
        read_adapter(folder, SHAPES)


def test_a_missing_file_is_refused(folder: Path) -> None:
    (folder / TENSORS_FILE).unlink()
    assert_refused(folder, None, "no such file")
    (folder / TENSORS_FILE).mkdir()
    assert_refused(folder, None, "no such file")
    (folder / CONFIG_FILE).unlink()
    assert_refused(folder, None, CONFIG_FILE)


def test_a_pickle_is_refused_with_the_reason(folder: Path) -> None:
    (folder / TENSORS_FILE).rename(folder / "adapter_model.bin")
    assert_refused(folder, "adapter_model.bin", "can run code")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (f"{PREFIX}.0.self_attn.q_proj.lora_magnitude_vector", "does not ask for a magnitude"),
        (f"{PREFIX}.0.self_attn.q_proj.lora_B.bias", "does not ask for a lora_bias"),
        (f"{PREFIX}.0.self_attn.q_proj.bias", "bias is 'none'"),
        ("base_model.model.lm_head.lora_A.weight", "vocabulary cannot be changed"),
        ("base_model.model.lm_head.modules_to_save.weight", "in full"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "vocabulary cannot be changed"),
        ("base_model.model.model.embed_tokens.weight", "vocabulary cannot be changed"),
        (
            "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
            "vocabulary cannot be changed",
        ),
        ("base_model.model.model.layers.0.mlp.experts.lora_A.weight", "not a lora_A"),
        (f"{PREFIX}.0.self_attn.q_proj.lora_C.weight", "not a lora_A"),
        (f"{PREFIX}.0.self_attn.q_proj.lora_A.other.weight", "not a lora_A"),
        (f"{PREFIX}.00.self_attn.q_proj.lora_A.weight", "not a lora_A"),
        (f"{PREFIX}.٠.self_attn.q_proj.lora_A.weight", "not a lora_A"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "not a lora_A"),
        (f"{PREFIX}.2.self_attn.q_proj.lora_A.weight", "2 layers"),
        (f"{PREFIX}.0.self_attn.q_proj.lora_A.default.weight", "same tensor"),
        ("", "not a lora_A"),
    ],
)
def test_a_tensor_that_would_be_dropped_is_refused_by_name(folder: Path, name: str, reason: str) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(4, 32)}))
    with pytest.raises(AdapterError, match=reason) as refused:
        read_adapter(folder, SHAPES)
    assert refused.value.param in (name, Q_A)


def test_a_module_that_the_base_has_not_is_refused(folder: Path) -> None:
    shapes = LoraShapes(2, {"q": SHAPES.modules["q"]})
    assert_refused(folder, f"{PREFIX}.0.self_attn.v_proj.lora_A.weight", "no self_attn.v_proj", shapes)


@pytest.mark.parametrize("half", ["A", "B"])
def test_half_of_a_pair_is_refused(folder: Path, half: str) -> None:
    name = f"{PREFIX}.1.self_attn.v_proj.lora_{half}.weight"
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    other = name.replace(f"lora_{half}", f"lora_{'AB'.replace(half, '')}")
    assert_refused(folder, other, f"lora_{half} is missing")


@pytest.mark.parametrize(
    ("half", "shape"),
    [
        ("A", (4, 31)),
        ("A", (5, 32)),
        ("A", (32, 4)),
        ("A", (4, 32, 1)),
        ("A", (0, 32)),
        ("B", (16, 4)),
        ("B", (4,)),
    ],
)
def test_a_wrong_shape_is_refused(folder: Path, half: str, shape: tuple[int, ...]) -> None:
    name = f"{PREFIX}.0.self_attn.q_proj.lora_{half}.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(shape)}))
    assert_refused(folder, name, "its shape is")


def test_a_rank_that_the_config_does_not_say_is_refused(folder: Path) -> None:
    set_config(folder, rank_pattern={r"layers\.1\..*": 8})
    assert_refused(folder, f"{PREFIX}.1.self_attn.q_proj.lora_A.weight", r"is \[4, 32\].*it is \[8, 32\]")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_value_that_is_not_finite_is_refused(folder: Path, value: float, dtype: torch.dtype) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({key: tensor.to(dtype) for key, tensor in tensors.items()})
        tensors[Q_A][2, 5] = value

    edit_tensors(folder, spoil)
    assert_refused(folder, Q_A, "not finite")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.bool, torch.float8_e4m3fn], ids=str)
def test_a_dtype_that_is_not_served_is_refused(folder: Path, dtype: torch.dtype) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({Q_A: tensors[Q_A].to(dtype)}))
    assert_refused(folder, Q_A, "dtype")


def test_a_file_without_tensors_is_refused(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.clear())
    assert_refused(folder, None, "no tensors")


EVERYWHERE = ["q_proj", "v_proj", "embed_tokens", "lm_head"]
VOCABULARY = LoraShapes(2, SHAPES.modules, (64, 32), False, {"embedding": "e", "output": "o"})


@pytest.mark.parametrize(
    ("name", "shape", "config", "reason"),
    [
        ("model.embed_tokens.lora_embedding_A", (4, 64), {}, "its B is missing"),
        ("model.embed_tokens.lora_embedding_B", (32, 4), {}, "its A is missing"),
        ("lm_head.lora_A.weight", (4, 32), {}, "its B is missing"),
        ("lm_head.lora_A.weight", (4, 32), {"alora_invocation_tokens": [1]}, "activated LoRA on lm_head"),
        ("lm_head.base_layer.weight", (64, 32), {}, "not this base's own"),
        ("lm_head.base_layer.weight", (63, 32), {}, "its shape is"),
        ("model.embed_tokens.weight", (65, 32), {}, "its shape is"),
        ("model.embed_tokens.token_adapter.trainable_tokens_delta", (1, 32), {}, "does not name its tokens"),
        (
            "model.embed_tokens.token_adapter.trainable_tokens_delta",
            (1, 32),
            {"trainable_token_indices": [64]},
            "not in the base's vocabulary",
        ),
        (
            "model.embed_tokens.token_adapter.trainable_tokens_delta",
            (1, 32),
            {"trainable_token_indices": [3, 4]},
            "its shape is",
        ),
        ("model.embed_tokens.modules_to_save.weight", (64, 32), {}, "in full only"),
    ],
)
def test_a_change_of_the_vocabulary_that_cannot_be_applied_is_refused(
    folder: Path, name: str, shape: tuple[int, ...], config: dict[str, Any], reason: str
) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({f"base_model.model.{name}": torch.ones(shape)}))
    set_config(folder, target_modules=EVERYWHERE, **config)
    assert_refused(folder, f"base_model.model.{name}", reason, VOCABULARY)


def test_a_value_of_an_extra_that_is_not_finite_is_refused(folder: Path) -> None:
    name = "base_model.model.model.embed_tokens.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.full((64, 32), torch.inf)}))
    assert_refused(folder, name, "not finite", VOCABULARY)


def test_the_embedding_cannot_be_changed_in_two_ways(folder: Path) -> None:
    prefix = "base_model.model.model.embed_tokens"
    set_config(folder, target_modules=EVERYWHERE)
    edit_tensors(
        folder,
        lambda tensors: tensors.update(
            {
                f"{prefix}.weight": torch.ones(64, 32),
                f"{prefix}.lora_embedding_A": torch.ones(4, 64),
                f"{prefix}.lora_embedding_B": torch.ones(32, 4),
            }
        ),
    )
    assert_refused(folder, None, "two ways", VOCABULARY)


def test_the_bases_own_copy_in_a_file_changes_nothing(folder: Path) -> None:
    plain = read_adapter(folder, VOCABULARY)
    weight = torch.randn(64, 32)
    edit_tensors(folder, lambda tensors: tensors.update({"base_model.model.lm_head.weight": weight}))
    shapes = LoraShapes(2, SHAPES.modules, (64, 32), False, {"output": fingerprint(weight.bfloat16())})
    assert read_adapter(folder, shapes).digest == plain.digest
    assert read_adapter(folder, VOCABULARY).traits() == ("rows of output",)
