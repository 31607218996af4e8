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
from ptx.fuzz import KINDS, case

SEEDS = {"attention": 5, "lora": 5, "sampling": 2}  # of other kinds three


def check(case: Case, capability: int) -> None:
    with Interpreted(capability):
        wrong = [check.error() for check in case.run() if check.failed()]
    assert not wrong, case.text


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_kernel_equals_its_reference_and_breaks_no_rule(kind: str, capability: int) -> None:
    for seed in range(SEEDS.get(kind, 3)):
        check(case(kind, seed, capability), capability)
