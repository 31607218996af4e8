"""Every Triton kernel as compiled for Ampere and Hopper, run by the PTX interpreter, against the reference.

`python -m personae.evals.kernels` runs as many random cases as there is time for.
"""

import os
from importlib.util import find_spec

import pytest

if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler", allow_module_level=True)

import triton
from ptx import costs
from ptx.cases_sampling import VOICES, sampling
from ptx.fuzz import KINDS, case
from ptx.launches import Interpreted

TABLE = costs.read()
ACCEPT = "If that is meant, accept it: `python -m personae.evals.kernels --costs`, and say why in the commit."


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", costs.CASES)
def test_a_compiled_kernel_equals_its_reference_breaks_no_rule_and_costs_what_it_did(
    name: str, capability: int
) -> None:
    found = costs.costs(costs.run(name, capability))
    if triton.__version__ == TABLE["triton"]:
        grown = list(costs.grown(name, capability, found, TABLE[f"sm_{capability}"].get(name, {})))
        assert not grown, "\n".join([*grown, ACCEPT])


@pytest.mark.parametrize("kind", KINDS)
def test_random_cases_equal_the_reference_and_break_no_rule(kind: str) -> None:
    for seed, capability in ((0, 90), (1, 80)):
        own = case(kind, seed, capability)
        with Interpreted(capability):
            wrong = [check.error() for check in own.run() if check.failed()]
        assert not wrong, own.text


def test_a_vocabulary_of_128256_gives_the_references_tokens() -> None:
    own = sampling(128_256, vocabulary=128_256, voices=tuple(range(1, len(VOICES))))
    with Interpreted(90):
        assert not [check.error() for check in own.run() if check.failed()]


def test_no_program_of_sampling_walks_a_vocabulary_alone() -> None:
    whole = [kernels for name, kernels in TABLE["sm_90"].items() if "151,936" in name]
    assert len(whole) == len(costs.WHOLE)
    assert max(cost["instructions"] for kernels in whole for cost in kernels.values()) < 20_000


def test_a_figure_that_grows_is_told_with_what_it_was() -> None:
    before = {"k": {"instructions": 100, "bytes": {"load 4": 50}}}
    assert not list(costs.grown("norm", 80, {"k": {"instructions": 102, "bytes": {"load 4": 8}}}, before))
    now = {"k": {"instructions": 103, "bytes": {"load 4": 50, "load 2": 6}}}
    assert sorted(costs.grown("norm", 80, now, before)) == [
        "norm, sm_80, k: 103 instructions, before 100",
        "norm, sm_80, k: 6 bytes (load 2), before 0",
    ]
