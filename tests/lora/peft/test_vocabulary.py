"""Changes of the vocabulary in a PEFT adapter: those that cannot be applied are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from corrupt_adapters import SHAPES, assert_refused, edit_tensors
from tiny_adapters import set_config

from personae.lora.base import fingerprint
from personae.lora.peft import read_adapter
from personae.lora.shapes import LoraShapes

EVERYWHERE = ["q_proj", "v_proj", "embed_tokens", "lm_head"]
VOCABULARY = LoraShapes(2, SHAPES.sites, (64, 32), False, {"embedding": "e", "output": "o"})


@pytest.mark.parametrize(
    ("name", "shape", "config", "reason"),
    [
        ("model.embed_tokens.lora_embedding_A", (4, 64), {}, "its B is missing"),
        ("model.embed_tokens.lora_embedding_B", (32, 4), {}, "its A is missing"),
        ("lm_head.lora_A.weight", (4, 32), {}, "its B is missing"),
        ("lm_head.lora_A.weight", (4, 32), {"alora_invocation_tokens": [1]}, "activated LoRA on lm_head"),
        ("lm_head.base_layer.weight", (64, 32), {}, "differs from this base"),
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
    shapes = LoraShapes(2, SHAPES.sites, (64, 32), False, {"output": fingerprint(weight.bfloat16())})
    assert read_adapter(folder, shapes).digest == plain.digest
    assert read_adapter(folder, VOCABULARY).traits() == ("rows of output",)
