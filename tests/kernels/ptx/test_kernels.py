"""Every Triton kernel as compiled for Ampere and Hopper, run by the PTX interpreter, against the reference.

`python -m personae.evals.kernels` runs as many random cases as there is time for.
"""

import os
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler", allow_module_level=True)

import triton
from ptx import costs
from ptx.cases_attention import attention
from ptx.cases_sampling import VOICES, sampling
from ptx.contract import CONTRACT
from ptx.fuzz import KINDS, case
from ptx.launches import Interpreted, watched
from ptx.reached import unreached

TABLE = costs.read()
ACCEPT = "If that is meant, accept it: `python -m personae.evals.kernels --costs`, and say why in the commit."


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", costs.CASES)
def test_a_compiled_kernel_equals_its_reference_breaks_no_rule_and_costs_what_it_did(
    name: str, capability: int
) -> None:
    """And the cases of the contract come to every instruction of it."""
    runs = costs.run(name, capability)
    found = costs.costs(runs)
    if triton.__version__ == TABLE["triton"]:
        assert name not in CONTRACT or not unreached(name, runs)
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


def test_a_wrong_count_of_a_level_fails_a_case_although_its_tokens_are_right() -> None:
    def spoil(kernel: str, arguments: dict[str, Any]) -> None:
        if kernel == "weigh_kernel":
            arguments["counts_ptr"][0, 31] += 1

    own = sampling(1, vocabulary=1000, voices=(3,))
    with Interpreted(90), watched(spoil):
        tokens, best, *stages = own.run()
    assert not tokens.failed()
    assert not best.failed()
    assert [check.failed() for check in stages].count(True) == 1


def test_parts_with_another_maximum_fail_a_case_although_they_merge_to_the_same() -> None:
    def spoil(kernel: str, arguments: dict[str, Any]) -> None:
        if kernel == "attention_kernel":
            stats = arguments["stats_ptr"].view(-1, 2)
            stats[:, 0] += 1
            stats[:, 1] /= 2
            arguments["sums_ptr"] /= 2

    own = attention(0, 90, dim=64, kv_heads=1, group=2, rows=[(1, 600)], window=None, processors=16)
    with Interpreted(90), watched(spoil):
        result, *parts = own.run()
    assert not result.failed()
    assert [check.failed() for check in parts] == [False, True, True, True]


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
