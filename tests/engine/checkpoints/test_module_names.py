"""Checkpoints with the names of transformers' modules."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import make_family_folder
from hf import hf_logits, hf_model, relative_error
from paged import PagedSequences
from safetensors.torch import load_file, save_file

from personae.engine.loader import load_model
from personae.errors import ModelLoadError

CPU = torch.device("cpu")


def by_module(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors by the names of transformers' modules, with experts, gates and ups apart, as
    GPTQModel writes them."""
    for name, tensor in model.state_dict().items():
        block, _, last = name.removesuffix(".weight").rpartition(".")
        fused = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        halves = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
        if not fused and len(halves) == 1:
            yield name, tensor
            continue
        for expert, matrix in enumerate(tensor if fused else [tensor]):
            for half, rows in zip(halves, matrix.chunk(len(halves)), strict=True):
                yield f"{block}.{expert}.{half}.weight" if fused else f"{block}.{half}.weight", rows.clone()


@pytest.mark.parametrize(
    "case", ["mixtral", "granitemoe", "granitemoeshared", "minimax_m2", "hy_v3", "phi3", "glm"]
)
def test_a_file_with_the_names_of_transformers_modules_is_the_same_model(case: str, tmp_path: Path) -> None:
    folder = make_family_folder(tmp_path, case)
    file, tokens = folder / "model.safetensors", [*range(40, 90)]
    model = hf_model(folder)
    truth, named = hf_logits(model, tokens), dict(by_module(model))
    assert named.keys() != load_file(file).keys()
    save_file(named, file, {"format": "pt"})
    decoder = load_model(folder, device=CPU, dtype="float32")
    hidden, _ = PagedSequences(decoder).forward({"a": tokens})
    assert max(map(relative_error, decoder.logits(hidden), truth)) < 1e-4


def test_a_tensor_under_both_of_its_names_is_refused(tmp_path: Path) -> None:
    folder = make_family_folder(tmp_path, "mixtral")
    file = folder / "model.safetensors"
    both = {"model.layers.1.mlp.gate.weight": torch.ones(8, 64)}
    save_file(load_file(file) | both, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"layers\.1\..*gate\.weight are the same tensor"):
        load_model(folder, device=CPU, dtype="float32")


def test_a_gate_and_an_up_apart_stay_in_their_bits_in_one_matrix(tmp_path: Path) -> None:
    folder = make_family_folder(tmp_path, "phi3")
    file, stored = folder / "model.safetensors", dict(by_module(hf_model(folder)))
    whole: list[torch.Tensor] = []
    for half in ("gate_proj", "up_proj"):
        module = f"model.layers.1.mlp.{half}"
        scales = torch.rand(len(stored[f"{module}.weight"]), 1) + 0.5  # not those of the largest number
        levels = torch.randint(-100, 101, stored[f"{module}.weight"].shape, dtype=torch.int8)
        stored |= {f"{module}.weight": levels, f"{module}.weight_scale": scales}
        whole.append(levels * scales)
    save_file(stored, file, {"format": "pt"})
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    how = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": how}))
    decoder = load_model(folder, device=CPU)
    assert decoder.quantization == "int-quantized"
    gate_up, _ = decoder.layers[1].mlp.linears()
    assert torch.equal(gate_up.plain().float(), torch.cat(whole).to(gate_up.plain().dtype).float())
