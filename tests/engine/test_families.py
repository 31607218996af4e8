"""A family of every kind of block against transformers and PEFT. `python -m personae.evals.families` checks
all."""

from pathlib import Path

import pytest
from family_checks import check_family
from family_models import CASES

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
]


@pytest.mark.parametrize("case", SAMPLE)
def test_a_family_gives_what_transformers_and_peft_give(case: str, tmp_path: Path) -> None:
    report = check_family(case, tmp_path)
    assert report.passed, str(report)


def test_every_case_is_of_a_family_that_is_served() -> None:
    assert {kind for kind, _ in CASES.values()} <= {*MODEL_TYPES}
