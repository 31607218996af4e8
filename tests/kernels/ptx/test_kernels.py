"""Every Triton kernel as compiled for Ampere and Hopper, run by the PTX interpreter, against the reference.

`python -m personae.evals.kernels` runs as many such cases as there is time for.
"""

import os
from importlib.util import find_spec

import pytest

if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler", allow_module_level=True)

from ptx import Interpreted
from ptx.cases import Case
from ptx.cases_sampling import VOICES, sampling
from ptx.fuzz import KINDS, case
from ptx.launches import Run

SEEDS = {"attention": 5, "lora": 5, "sampling": 2}  # of other kinds three


def check(case: Case, capability: int) -> list[Run]:
    with Interpreted(capability) as gpu:
        wrong = [check.error() for check in case.run() if check.failed()]
    assert not wrong, case.text
    return gpu.runs


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_kernel_equals_its_reference_and_breaks_no_rule(kind: str, capability: int) -> None:
    for seed in range(SEEDS.get(kind, 3)):
        check(case(kind, seed, capability), capability)


@pytest.mark.parametrize("vocabulary", [128_256, 151_936])
def test_whole_vocabularies_give_the_references_tokens(vocabulary: int) -> None:
    runs = check(sampling(vocabulary, vocabulary=vocabulary, voices=tuple(range(1, len(VOICES)))), 90)
    assert max(run.counts.instructions for run in runs) < 20_000, "a program walks the vocabulary alone"
