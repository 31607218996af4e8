"""Changes of the vocabulary in a PEFT adapter: those that cannot be applied are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from corrupt_adapters import SHAPES, assert_refused, edit_tensors
from tiny_adapters import set_config

from personae.lora.base import fingerprint
from personae.lora.peft import read_adapter
from personae.lora.peft_config import PeftConfig
from personae.lora.shapes import LoraShapes

EVERYWHERE = ["q_proj", "v_proj", "embed_tokens", "lm_head"]
VOCABULARY = LoraShapes(2, SHAPES.sites, (64, 32), False, {})


@pytest.mark.parametrize(
    ("name", "shape", "config", "reason"),
    [
        ("model.embed_tokens.lora_embedding_A", (4, 64), {}, "its B is missing"),
        ("model.embed_tokens.lora_embedding_B", (32, 4), {}, "its A is missing"),
        ("lm_head.lora_A.weight", (4, 32), {}, "its B is missing"),
        ("lm_head.lora_A.weight", (4, 32), {"alora_invocation_tokens": [1]}, "activated LoRA on lm_head"),
        ("lm_head.base_layer.weight", (64, 32), {}, "differs from this base"),
        ("lm_head.base_layer.weight", (63, 32), {}, "its shape is"),
        ("model.embed_tokens.weight", (65, 32), {}, "65 tokens, the base 64; adapters cannot add"),
        ("model.embed_tokens.weight", (65, 31), {}, "its shape is"),
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


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bases_own_copy_in_a_file_changes_nothing(
    folder: Path, held: torch.dtype, stored: torch.dtype
) -> None:
    plain = read_adapter(folder, VOCABULARY)
    weight = torch.randn(64, 32).bfloat16()  # as it was published
    weight[3, 4] = 1e-6  # float16 loses bits of it
    copy = weight.to(held).to(stored)
    edit_tensors(folder, lambda tensors: tensors.update({"base_model.model.lm_head.weight": copy}))
    shapes = LoraShapes(2, SHAPES.sites, (64, 32), False, {"output": fingerprint(weight)})
    assert read_adapter(folder, shapes).digest == plain.digest


def test_a_matrix_that_was_trained_is_no_copy(folder: Path) -> None:
    plain = read_adapter(folder, VOCABULARY)
    weight = torch.randn(64, 32).bfloat16()
    trained = weight.clone()
    trained[5, 6] *= 1.01
    edit_tensors(folder, lambda tensors: tensors.update({"base_model.model.lm_head.weight": trained}))
    shapes = LoraShapes(2, SHAPES.sites, (64, 32), False, {"output": fingerprint(weight)})
    assert read_adapter(folder, shapes).digest != plain.digest
    assert read_adapter(folder, shapes).traits() == ("rows of output",)


@pytest.mark.parametrize("tied", [True, False])
def test_the_tokens_of_both_ends_of_a_tied_base_are_one_tensor(folder: Path, tied: bool) -> None:
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(2, 32)}))
    set_config(folder, trainable_token_indices={"embed_tokens": [5, 1], "lm_head": [5, 1]})
    shapes = LoraShapes(2, SHAPES.sites, (64, 32), tied, {})
    if tied:
        assert read_adapter(folder, shapes).traits() == ("rows of embedding and output",)
    else:
        assert_refused(folder, "trainable_token_indices", "no rows for it", shapes)


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model.", "language_model.model."])
def test_modules_may_have_their_full_names(prefix: str) -> None:
    config = PeftConfig(
        {
            "peft_type": "LORA",
            "modules_to_save": [f"{prefix}embed_tokens", "lm_head"],
            "trainable_token_indices": {f"{prefix}embed_tokens": [5]},
        }
    )
    assert config.saved == {"model.embed_tokens", "lm_head"}
    assert config.trained_tokens == {"model.embed_tokens": (5,)}
