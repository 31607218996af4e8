"""Adapters whose values are finite and overflow in the server's precision."""

from pathlib import Path
from typing import Any

import pytest
import torch
from corrupt_adapters import PREFIX, Q_A, SHAPES, edit_tensors
from safetensors.torch import save_file
from tiny_adapters import set_config

from personae.errors import AdapterError
from personae.lora.bounds import AdapterBounds
from personae.lora.fit import check_fit
from personae.lora.peft import read_adapter
from personae.lora.peft_names import TENSORS_FILE
from personae.lora.shapes import LoraShapes
from personae.lora.sites import sites

Q_B = Q_A.replace("lora_A", "lora_B")
V_B = f"{PREFIX}.1.self_attn.v_proj.lora_B.weight"
VOCABULARY = LoraShapes(2, SHAPES.sites, (64, 32), False, {})


def check(folder: Path, dtype: torch.dtype, shapes: LoraShapes = SHAPES) -> None:
    bounds = AdapterBounds(shapes, max_rank=64, max_value=torch.finfo(dtype).max)
    check_fit(read_adapter(folder, shapes), bounds)


def refused(folder: Path, dtype: torch.dtype, name: str, shapes: LoraShapes = SHAPES) -> str:
    """What is said when an adapter is refused for that tensor; the same adapter can be read."""
    with pytest.raises(AdapterError) as raised:
        check(folder, dtype, shapes)
    assert raised.value.param == name
    assert repr(name) in raised.value.message
    assert (raised.value.status, raised.value.code) == (400, "invalid_adapter")
    return raised.value.message


@pytest.mark.parametrize(
    ("dtype", "values", "alpha", "name"),
    [
        (torch.float16, {Q_A: 7e4}, 8, Q_A),
        (torch.float16, {V_B: 7e4}, 8, V_B),
        (torch.float16, {V_B: 4e4}, 8, V_B),  # the scaling is 2
        (torch.bfloat16, {Q_A: 3.4e38}, 8, Q_A),
        (torch.bfloat16, {Q_B: 1e38}, 1000, Q_B),
        (torch.float32, {Q_B: 1e38}, 1000, Q_B),
        (torch.float16, {Q_A: 200.0, Q_B: 200.0}, 8, Q_B),  # in range each, not their product
        (torch.bfloat16, {Q_A: 1e37, Q_B: 1e37}, 8, Q_B),
        (torch.float32, {Q_A: 1e10, Q_B: 1e10}, 8, Q_B),
        (torch.float32, {Q_A: 1e18, V_B: 1e37}, 8, V_B),
    ],
)
def test_an_adapter_whose_finite_weights_overflow_is_refused_with_the_tensor(
    folder: Path, dtype: torch.dtype, values: dict[str, float], alpha: float, name: str
) -> None:
    check(folder, dtype)
    set_config(folder, lora_alpha=alpha)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        for each, value in values.items():
            tensors[each][0, 0] = value

    edit_tensors(folder, spoil)
    assert "outside the range" in refused(folder, dtype, name)


def test_what_is_beside_the_low_rank_is_named_too(folder: Path) -> None:
    name = Q_A.replace("lora_A.weight", "lora_B.bias")
    set_config(folder, lora_bias=True, lora_alpha=1e6)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        for each in list(tensors):
            if "lora_A" in each:
                outputs = len(tensors[each.replace("lora_A", "lora_B")])
                tensors[each.replace("lora_A.weight", "lora_B.bias")] = torch.zeros(outputs)
        tensors[name][0] = 1e38  # finite, and with the scaling not even in float32

    edit_tensors(folder, add)
    refused(folder, torch.bfloat16, name)


@pytest.mark.parametrize(
    ("config", "tensors", "name"),
    [
        (
            {"target_modules": ["embed_tokens"]},
            {"model.embed_tokens.lora_embedding_A": (4, 64), "model.embed_tokens.lora_embedding_B": (32, 4)},
            "model.embed_tokens.lora_embedding_B",
        ),
        (
            {"target_modules": ["lm_head"]},
            {"lm_head.lora_A.weight": (4, 32), "lm_head.lora_B.weight": (64, 4)},
            "lm_head.lora_B.weight",
        ),
        ({"modules_to_save": ["lm_head"]}, {"lm_head.weight": (64, 32)}, "lm_head.weight"),
        (
            {"trainable_token_indices": [3]},
            {"model.embed_tokens.token_adapter.trainable_tokens_delta": (1, 32)},
            "model.embed_tokens.token_adapter.trainable_tokens_delta",
        ),
    ],
)
def test_what_changes_the_vocabulary_is_named_too(
    folder: Path, config: dict[str, Any], tensors: dict[str, tuple[int, int]], name: str
) -> None:
    set_config(folder, **{"target_modules": ["q_proj"], **config})
    large = {f"base_model.model.{each}": torch.full(shape, 6e4) for each, shape in tensors.items()}
    large[f"base_model.model.{name}"] *= 2 if len(tensors) == 1 else 1
    save_file(large, folder / TENSORS_FILE)
    refused(folder, torch.float16, f"base_model.model.{name}", VOCABULARY)


def test_the_parts_of_what_the_base_has_as_one_are_named_as_the_one(tmp_path: Path) -> None:
    shapes = LoraShapes(2, sites(SHAPES.modules, merged=True))
    name = f"{PREFIX}.0.self_attn.qkv_proj.lora_"
    outputs = sum(SHAPES.modules[module][1] for module in "qkv")
    b = torch.zeros(outputs, 4)
    b[-1, 0] = 7e4  # of v
    (tmp_path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 4, "target_modules": ["qkv_proj"]}'
    )
    save_file({f"{name}A.weight": torch.zeros(4, 32), f"{name}B.weight": b}, tmp_path / TENSORS_FILE)
    refused(tmp_path, torch.float16, f"{name}B.weight", shapes)
