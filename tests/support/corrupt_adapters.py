"""A plain adapter that tests corrupt, and the errors that they expect."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_adapters import lora_shapes, tiny_config

from personae.errors import AdapterError
from personae.lora.peft import read_adapter
from personae.lora.peft_names import TENSORS_FILE
from personae.lora.shapes import LoraShapes

BASE = tiny_config()
SHAPES = lora_shapes(BASE)
PREFIX = "base_model.model.model.layers"
Q_A = f"{PREFIX}.0.self_attn.q_proj.lora_A.weight"


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
