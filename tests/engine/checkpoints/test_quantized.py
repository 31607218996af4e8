"""Checkpoints that the tools themselves have quantized: what their weights are, and what they answer."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from personae.engine.checkpoints.huggingface import Folder

DATA = Path(__file__).parents[2] / "data" / "checkpoints"
NAMES = sorted(folder.name for folder in DATA.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_is_bit_for_bit_what_the_tool_that_made_it_dequantizes(name: str) -> None:
    folder = Folder(DATA / name)
    stored = folder.tensors(folder.config())
    expected = json.loads((DATA / name / "expected.json").read_text())
    assert expected
    for module, meant in expected.items():
        dtype = meant.split()[0]
        weight = stored[f"{module}.weight"].read() + 0.0  # no minus zeros
        raw = weight.bfloat16().view(torch.int16) if dtype == "bfloat16" else weight.float()
        found = f"{dtype} {list(weight.shape)} {hashlib.sha256(raw.contiguous().numpy().tobytes()).hexdigest()}"
        assert found == meant, module
