"""The Triton kernels, interpreted. That is chosen before Triton is imported: in a process of its own."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "triton"

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton on this platform")


def test_interpreted_kernels_equal_their_references() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", str(FOLDER)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=FOLDER.parents[2],
        capture_output=True,
        text=True,
        timeout=500,
    )
    print(run.stdout, run.stderr)  # pytest shows it when the test fails
    assert run.returncode == 0, "see the output below: the interpreted tests failed"
    assert " passed" in run.stdout
