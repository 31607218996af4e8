"""A family of every kind of block against transformers and PEFT. `python -m personae.evals.families` checks
all."""

from pathlib import Path

import pytest
import torch
from family_checks import check_family
from family_models import CASES, make_family_folder
from hf import hf_logits, hf_model, relative_error
from paged import PagedSequences
from tiny_models import model_folder

from personae.engine.loader import load_model
from personae.engine.models import MODEL_TYPES

SAMPLE = [
    "glm4",  # interleaved rotary embedding over half of the head, four norms
    "glm4_moe",  # routing with a correction and groups, a shared expert, a dense layer
    "granitemoeshared",  # experts in one tensor, a merged shared MLP
    "gemma2",  # soft caps
    "ministral3",  # q scaled by position
    "gpt_oss",  # sinks, clamped experts with biases
    "cohere2",  # LayerNorm, parallel halves
    "starcoder2",  # no gate
    "lfm2",  # short convolutions
    "qwen3_next",  # gated delta nets and gated attention
    "granitemoehybrid, Mamba",  # Mamba-2
    "deepseek_v3",  # latent attention, with YaRN's scale of scores
]


@pytest.mark.parametrize("case", SAMPLE)
def test_a_family_gives_what_transformers_and_peft_give(case: str, tmp_path: Path) -> None:
    report = check_family(case, tmp_path)
    assert report.passed, str(report)


def test_every_case_is_of_a_family_that_is_served() -> None:
    assert {kind for kind, _ in CASES.values()} <= {*MODEL_TYPES}


@pytest.mark.parametrize("case", ["helium", "gemma2", "arcee"])
def test_a_block_that_the_whole_decoder_in_one_call_lacks_runs_layer_by_layer(
    case: str, tmp_path: Path
) -> None:
    folder = make_family_folder(tmp_path, case)
    decoder = load_model(folder, device=torch.device("cpu"), dtype="bfloat16")
    assert decoder._fused is None
    tokens = [*range(30, 60)]
    truth = hf_logits(hf_model(folder), tokens)
    hidden, _ = PagedSequences(decoder).forward({"a": tokens})
    errors = sorted(map(relative_error, decoder.logits(hidden), truth))
    assert errors[len(errors) // 2] < 0.1


def test_a_family_of_usual_blocks_runs_in_one_call_where_there_is_one(tmp_path: Path) -> None:
    fused = [
        load_model(folder, device=torch.device("cpu"), dtype="bfloat16")._fused is not None
        for folder in (model_folder("llama"), make_family_folder(tmp_path, "seed_oss"))
    ]
    assert fused[0] == fused[1]
