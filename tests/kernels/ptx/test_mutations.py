"""The contract's cases notice what a wrong compiler would do. `python -m personae.evals.kernels --mutations`
makes the whole table of docs/internals/gpu.md; here is a little of it."""

import os
from importlib.util import find_spec

import pytest

if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler", allow_module_level=True)

from marks import long
from ptx.contract import CONTRACT
from ptx.mutations import GROUPS, mutants, noticed, sample, subjects
from ptx.reasons import explain


@pytest.mark.parametrize(
    ("name", "capability"),
    [("append", 80), ("experts", 90), ("decode", 80), long("prefill", 90)],
)
def test_a_changed_instruction_is_noticed_or_changes_nothing_for_a_reason(name: str, capability: int) -> None:
    seen = 0
    for subject in subjects([make(capability) for make in CONTRACT[name]], capability):
        for mutant in sample(list(mutants(subject.prepared)), 1, seed=3):
            found = noticed(subject, mutant)
            assert found or explain(subject, mutant), (subject.kernel, mutant)
            seen += found
    assert seen >= 2


def test_every_class_of_change_has_places() -> None:
    (subject,) = subjects([make(90) for make in CONTRACT["experts"][2:3]], 90)
    assert {mutant.group for mutant in mutants(subject.prepared)} == set(GROUPS)
