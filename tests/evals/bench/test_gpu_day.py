"""The one command for a machine with a GPU, with a Python that notes what it is asked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from patience import PATIENCE

SCRIPT = Path(__file__).parents[3] / "evals" / "bench" / "gpu" / "day.sh"
PYTHON = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
    "-c import msgspec") exit {missing} ;;
    *pip*) exit {refused} ;;
    *gpu*) echo a finding; sleep {long}; exit {status} ;;
esac
"""


def day(
    folder: Path,
    *args: str,
    missing: int = 0,
    refused: int = 0,
    long: int = 0,
    status: int = 0,
    most: int = 60,
) -> tuple[int, list[str]]:
    """The exit status, and what Python was asked."""
    log, python = folder / "asked", folder / "python"
    text = PYTHON.format(log=log, missing=missing, refused=refused, long=long, status=status)
    python.write_text(text, encoding="utf-8")
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "MOST": str(most)}
    done = subprocess.run(
        ["bash", SCRIPT, folder / "out", *args],
        env=environment,
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    return done.returncode, log.read_text(encoding="utf-8").splitlines()


def test_one_command_checks_and_measures_and_keeps_the_log(tmp_path: Path) -> None:
    status, asked = day(tmp_path, "--only", "sgmv")
    assert status == 0
    assert asked[1:] == [f"-m personae.evals.bench.gpu --seconds 330 --out {tmp_path}/out --only sgmv"]
    assert (tmp_path / "out" / "log.txt").read_text(encoding="utf-8") == "a finding\n"


def test_msgspec_is_installed_from_the_wheels_that_were_brought(tmp_path: Path) -> None:
    status, asked = day(tmp_path, missing=1)
    assert status == 0
    assert "--no-index --find-links build/gpu/wheels" in asked[1]
    assert asked[1].endswith("msgspec")
    status, asked = day(tmp_path, missing=1, refused=3)
    assert (status, "pip" in asked[-1]) == (3, True), "it went on without"


@pytest.mark.parametrize("status", [1, 2])
def test_the_exit_status_is_that_of_the_checks(tmp_path: Path, status: int) -> None:
    assert day(tmp_path, status=status)[0] == status


def test_what_takes_too_long_is_ended_and_what_was_found_is_kept(tmp_path: Path) -> None:
    assert day(tmp_path, long=600, most=1)[0] == 124
    assert (tmp_path / "out" / "log.txt").read_text(encoding="utf-8") == "a finding\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_command_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", SCRIPT, tmp_path],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 2
    assert "GPU" in done.stdout
