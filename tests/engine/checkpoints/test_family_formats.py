"""Families of unusual kinds in formats that can be written without further libraries.
`python -m personae.evals.family_formats` checks every family in every format."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from family_checks import check_checkpoint
from family_formats import FORMATS, GGUF, make
from family_models import CASES
from gguf import GGUFReader
from gguf_conversion import CASES as CONVERTED
from safetensors.torch import load_file, save_file

from personae.engine.checkpoints.compared import EQUAL, compared
from personae.engine.checkpoints.huggingface import Folder
from personae.engine.loader import load_model
from personae.errors import ModelLoadError
from personae.evals.family_formats import guide_table


@pytest.mark.parametrize(
    ("form", "case"),
    [
        ("FP8 blocks", "deepseek_v3"),  # latent attention, experts apart, a shared one, a dense layer
        ("FP8 blocks", "gpt_oss"),  # experts in one tensor, transposed, gates and ups in turn
        ("FP8 blocks", "granitemoehybrid, Mamba"),  # experts in one tensor, a merged shared MLP, states
        ("GGUF Q8_0", "falcon_h1"),  # scales inside the weights: without adapters
        ("GGUF Q4_0", "gemma4, experts"),  # a dense MLP beside experts
    ],
)
def test_a_quantized_family_gives_what_transformers_and_peft_give_on_its_dequantized_weights(
    form: str, case: str, tmp_path: Path
) -> None:
    checkpoint, plain = make(form, case, tmp_path)
    report = check_checkpoint(checkpoint, plain, tmp_path)
    assert report.passed, str(report)
    assert compared().cells(form)[case] == EQUAL
    if checkpoint.is_dir():
        quantized = [t for t in Folder(checkpoint).stored().values() if t.dtype == "fp8"]
    else:
        quantized = [t for t in GGUFReader(checkpoint).tensors if t.tensor_type.name in form]
    assert len(quantized) > 3  # of Falcon-H1, whose converter changes most weights


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda scales: scales[:, :1], "gate_up_proj_scale_inv: expected [8, 2, 6]"),
        (lambda scales: scales * torch.nan, "gate_up_proj_scale_inv: has scales that are not finite"),
        (None, "gate_up_proj: expected [8, 64, 192], found [8, 64, 192] F8_E4M3"),
    ],
)
def test_scales_of_experts_in_one_tensor_that_do_not_fit_are_named(
    change: Callable[[torch.Tensor], torch.Tensor] | None, why: str, tmp_path: Path
) -> None:
    checkpoint, _ = make("FP8 blocks", "gpt_oss", tmp_path)
    file, name = checkpoint / "model.safetensors", "model.layers.1.mlp.experts.gate_up_proj_scale_inv"
    stored = load_file(file)
    scales = stored.pop(name)
    if change is not None:
        stored[name] = change(scales).contiguous()
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(ModelLoadError) as refused:
        load_model(checkpoint, device=torch.device("cpu"), dtype="float32")
    assert why in str(refused.value)


def test_what_is_recorded_has_every_case_and_every_format() -> None:
    known = compared()
    assert known.cases == {name: kind for name, (kind, _) in CASES.items()}
    assert [*known.formats] == [*FORMATS, *GGUF]
    for name in known.formats:
        assert [*known.cells(name)] == [*(CONVERTED if name in GGUF else CASES)]
        assert {case for cases in known.formats[name].others.values() for case in cases} <= {*CASES}


def test_the_guide_has_the_table_of_what_is_recorded() -> None:
    guide = Path(__file__).parents[3] / "docs" / "guide" / "quantization.md"
    assert "\n".join(guide_table(compared())) in guide.read_text()
