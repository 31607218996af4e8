"""What of a PEFT adapter cannot be applied is refused by name."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from corrupt_adapters import PREFIX, Q_A, SHAPES, assert_refused, edit_tensors
from peft import LoraConfig
from tiny_adapters import set_config

from personae.errors import AdapterError
from personae.lora import peft_config
from personae.lora.peft import read_adapter
from personae.lora.peft_names import CONFIG_FILE, TENSORS_FILE
from personae.lora.shapes import LoraShapes
from personae.lora.sites import sites

REFUSED_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "only LORA"),
    ({"peft_type": None}, "only LORA"),
    ({"use_dora": "yes"}, "true or false"),
    ({"lora_bias": True, "use_dora": True}, "no DoRA with"),
    ({"bias": "some"}, "none, lora_only, all"),
    ({"modules_to_save": ["lm_head"]}, "no weight for it"),
    ({"modules_to_save": ["norm"]}, "in full"),
    ({"trainable_token_indices": [1, 2]}, "no rows"),
    ({"trainable_token_indices": {"norm": [1]}}, "only tokens of"),
    ({"trainable_token_indices": [1, 1]}, "twice"),
    ({"trainable_token_indices": [-1]}, "at least 0"),
    ({"alora_invocation_tokens": "hey"}, "a list of"),
    ({"use_dora": True, "alora_invocation_tokens": [1, 2]}, "activated LoRA"),
    ({"bias": "all", "alora_invocation_tokens": [1, 2]}, "activated LoRA"),
    ({"fan_in_fan_out": True}, "transposed"),
    ({"layer_replication": [[0, 1], [0, 1]]}, "layer replication changes"),
    ({"megatron_config": {"x": 1}}, "Megatron"),
    ({"target_parameters": "experts.gate_up_proj"}, "a list of names"),
    ({"use_qalora": True}, "QALoRA"),
    ({"use_bdlora": {"nblocks": 2}}, "block-diagonal"),
    ({"arrow_config": {"top_k": 2}}, "Arrow"),
    ({"kasa_config": {"beta": 1e-4}}, "KaSA"),
    ({"monteclora_config": {"num_samples": 8}}, "MonteCLoRA"),
    ({"velora_config": {"scale": 1.0}}, "VeLoRA"),
    ({"use_mystery_lora": True}, "an unknown field may change"),
    ({"task_type": "SEQ_CLS"}, "text generation"),
    ({"init_lora_weights": "pissa"}, "base weights"),
    ({"init_lora_weights": "pissa_niter_16"}, "base weights"),
    ({"init_lora_weights": "olora"}, "base weights"),
    ({"init_lora_weights": "corda"}, "base weights"),
    ({"init_lora_weights": "loftq"}, "base weights"),
    ({"init_lora_weights": "lora_ga"}, "base weights"),
    ({"init_lora_weights": ["gaussian", None]}, r'is \["gaussian", null\]: .* base weights'),
    ({"use_rslora": "false"}, "true or false"),
    ({"r": 0}, "a rank must be"),
    ({"r": 4.0}, "a rank must be"),
    ({"r": True}, "is true: a rank must be"),
    ({"r": 10**9}, "a rank must be"),
    ({"rank_pattern": {"q_proj": "4"}}, "a rank must be"),
    ({"rank_pattern": ["q_proj"]}, "object"),
    ({"rank_pattern": {"(a+)+(": 4}}, "unterminated"),
    ({"lora_alpha": "16"}, "finite number"),
    ({"lora_alpha": math.nan}, "finite number"),
    ({"lora_alpha": math.inf}, "finite number"),
    ({"lora_alpha": 10**400}, "finite number"),
    ({"alpha_pattern": {"q_proj": None}}, "is null: it must be a finite number"),
    ({"alpha_pattern": 3}, "object"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED_FIELDS, ids=lambda value: str(value)[:40])
def test_a_field_that_would_have_to_be_ignored_is_refused_by_name(
    folder: Path, fields: dict[str, Any], reason: str
) -> None:
    set_config(folder, **fields)
    assert_refused(folder, next(iter(fields)), reason)


@pytest.mark.parametrize(
    "fields",
    [
        {
            "task_type": None,
            "auto_mapping": {
                "base_model_class": "LlamaForCausalLM",
                "parent_library": "transformers.models.llama.modeling_llama",
                "unsloth_fixed": True,
            },
        },
        {"lora_dtype": "bfloat16", "lorap_lr_ratio": 16.0, "lorap_emb_lr": 1e-06},
        {"loraplus_lr_ratio": 16.0},
    ],
)
def test_what_trainers_note_of_their_training_means_nothing(folder: Path, fields: dict[str, Any]) -> None:
    plain = read_adapter(folder, SHAPES)
    set_config(folder, **fields)
    assert read_adapter(folder, SHAPES).digest == plain.digest


def test_every_field_of_peft_s_config_is_read_of_no_effect_or_refused_with_its_own_reason() -> None:
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    known = {*peft_config.READ, *peft_config.HARMLESS, *peft_config.NEUTRAL, *peft_config.REASONS}
    assert fields <= known
    listed = (Path(__file__).resolve().parents[3] / "docs/guide/adapters.md").read_text(encoding="utf-8")
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
    with pytest.raises(AdapterError, match=reason) as refused:
        read_adapter(folder, SHAPES)
    assert refused.value.param == ("peft_type" if text == b"{}" else CONFIG_FILE)


@pytest.mark.parametrize(("token", "served"), [(99, True), (100, False)])
def test_an_invocation_that_the_base_cannot_read_is_refused(folder: Path, token: int, served: bool) -> None:
    shapes = dataclasses.replace(SHAPES, vocabulary=(100, 32))
    set_config(folder, alora_invocation_tokens=[3, token])
    if served:
        assert read_adapter(folder, shapes).invocation == (3, token)
        return
    with pytest.raises(AdapterError, match="has 100; the base's tokens are from 0 to 99") as refused:
        read_adapter(folder, shapes)
    assert refused.value.param == "alora_invocation_tokens"


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
        ("base_model.model.model.layers.0.mlp.experts.lora_A.weight", "no such experts or router"),
        (f"{PREFIX}.0.self_attn.q_proj.lora_C.weight", "not a lora_A"),
        (f"{PREFIX}.0.self_attn.q_proj.lora_A.other.weight", "not a lora_A"),
        (f"{PREFIX}.00.self_attn.q_proj.lora_A.weight", "not a lora_A"),
        (f"{PREFIX}.٠.self_attn.q_proj.lora_A.weight", "not a lora_A"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "PEFT.s names begin with"),
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
    shapes = LoraShapes(2, sites({"q": SHAPES.modules["q"]}))
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


@pytest.mark.parametrize(
    ("base", "delivered"),
    [
        ("meta-llama/Llama-3.2-1B", r" \(the adapter was made for 'meta-llama/Llama-3.2-1B'\)$"),
        ("x" * 5000, r"'x{256}'\)$"),
        (None, r"the base and the config need \[4, 32\]$"),
        (["a"], r"the base and the config need \[4, 32\]$"),
    ],
)
def test_a_refusal_of_what_does_not_fit_names_the_base_that_the_adapter_was_made_for(
    folder: Path, base: object, delivered: str
) -> None:
    set_config(folder, base_model_name_or_path=base)
    edit_tensors(folder, lambda tensors: tensors.update({Q_A: torch.ones(4, 64)}))
    assert_refused(folder, Q_A, delivered)


def test_a_rank_that_the_config_does_not_say_is_refused(folder: Path) -> None:
    set_config(folder, rank_pattern={r"layers\.1\..*": 8})
    assert_refused(folder, f"{PREFIX}.1.self_attn.q_proj.lora_A.weight", r"is \[4, 32\].*need \[8, 32\]")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_value_that_is_not_finite_is_refused(folder: Path, value: float, dtype: torch.dtype) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({key: tensor.to(dtype) for key, tensor in tensors.items()})
        tensors[Q_A][2, 5] = value

    edit_tensors(folder, spoil)
    assert_refused(folder, Q_A, "not finite")


def test_a_float8_value_that_is_no_number_is_refused(folder: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[Q_A][2, 5] = math.nan
        tensors.update({key: tensor.to(torch.float8_e4m3fn) for key, tensor in tensors.items()})

    edit_tensors(folder, spoil)
    assert_refused(folder, Q_A, "not finite")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.bool, torch.float8_e5m2], ids=str)
def test_a_dtype_that_is_not_served_is_refused(folder: Path, dtype: torch.dtype) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({Q_A: tensors[Q_A].to(dtype)}))
    assert_refused(folder, Q_A, "dtype")


def test_a_file_without_tensors_is_refused(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.clear())
    assert_refused(folder, TENSORS_FILE, "no tensors")
