"""PERSONAE_CPU_INSTRUCTIONS: kernels for a poorer set of instructions than the processor has."""

import os
import subprocess
import sys

import pytest

from personae.kernels.cpu import build, operators
from personae.kernels.cpu.prebuilt import features_here, fitting

SETS = [variant.name for variant in fitting(features_here())]


@pytest.mark.skipif("x86-64-v3" not in SETS or "fuse" not in operators(), reason="no compiler or no AVX2")
def test_a_process_can_be_held_to_avx2_and_still_has_the_fused_decoder(laptop: object) -> None:
    program = (
        "import torch\n"
        "from personae.kernels.cpu.build import library\n"
        "from personae.kernels.registry import optional\n"
        "assert optional('fuse', torch.device('cpu'), torch.bfloat16)\n"
        "print(library().personae_instructions(1))\n"  # pairs, which AVX2 does not have
    )
    environment = os.environ | {"PERSONAE_CPU_INSTRUCTIONS": "x86-64-v3"}
    run = subprocess.run(  # this interpreter
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "0"


def test_a_set_that_the_processor_does_not_have_is_an_error_that_names_those_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PERSONAE_CPU_INSTRUCTIONS", "avx9000")
    with pytest.raises(build.KernelError, match=r"PERSONAE_CPU_INSTRUCTIONS.*'avx9000'; it has: \S+"):
        build.library.__wrapped__()
