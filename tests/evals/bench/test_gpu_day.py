"""The two calls for a machine with a GPU, with a Python that notes what it is asked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from patience import PATIENCE

from personae.evals.bench.gpu import travels

SCRIPTS = Path(__file__).parents[3] / "evals" / "bench" / "gpu"
PYTHON = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
    *"import msgspec") exit {missing} ;;
    *"import torch"*) exit {no_gpu} ;;
    *"pip list"*) exit 0 ;;
    *pip*) exit {refused} ;;
    *"--only sgmv, torch.bfloat16"*) exit {first} ;;
    *{slow}*) echo a finding; sleep {long}; exit {status} ;;
esac
"""


def call(
    script: str,
    folder: Path,
    *args: str,
    slow: str = "gpu",
    missing: int = 0,
    no_gpu: int = 0,
    refused: int = 0,
    first: int = 0,
    long: int = 0,
    status: int = 0,
    most: int = 60,
) -> tuple[int, list[str]]:
    """The exit status, and what Python was asked in this call."""
    log, python = folder / "asked", folder / "python"
    log.write_text("", encoding="utf-8")
    text = PYTHON.format(
        log=log,
        slow=slow,
        missing=missing,
        no_gpu=no_gpu,
        refused=refused,
        first=first,
        long=long,
        status=status,
    )
    python.write_text(text, encoding="utf-8")
    python.chmod(0o755)
    own = {"PYTHON": str(python), "MOST": str(most), "KEPT": str(folder / "kept")}
    done = subprocess.run(
        ["bash", SCRIPTS / script, folder / "out", *args],
        env={**os.environ, **own},
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    return done.returncode, log.read_text(encoding="utf-8").splitlines()


def test_the_first_call_asks_one_operator_then_everything_and_keeps_the_log(tmp_path: Path) -> None:
    status, asked = call("day1.sh", tmp_path, "--seed", "7")
    assert status == 0
    kit = [line for line in asked if "bench.gpu" in line]
    assert kit == [
        f"-m personae.evals.bench.gpu --only sgmv, torch.bfloat16 --seconds 20 --out {tmp_path}/out/first",
        f"-m personae.evals.bench.gpu --seconds 170 --out {tmp_path}/out --seed 7",
    ]
    assert (tmp_path / "out" / "log.txt").read_text(encoding="utf-8") == "a finding\n"
    assert (tmp_path / "kept" / "found" / "log.txt").exists()


def test_a_first_call_again_goes_on_with_what_was_found_although_its_folder_was_emptied(
    tmp_path: Path,
) -> None:
    call("day1.sh", tmp_path)
    (tmp_path / "kept" / "found" / "gpu.json").write_text("{}", encoding="utf-8")
    for file in (tmp_path / "out").iterdir():
        file.unlink()
    _, asked = call("day1.sh", tmp_path)
    assert asked[-1].endswith(f"--out {tmp_path}/out --resume")
    assert (tmp_path / "out" / "gpu.json").read_text(encoding="utf-8") == "{}"


def test_msgspec_is_installed_from_the_wheels_that_were_brought(tmp_path: Path) -> None:
    status, asked = call("day1.sh", tmp_path, missing=1)
    assert status == 0
    (install,) = [line for line in asked if "pip install" in line]
    assert "--no-index --find-links build/gpu/wheels" in install
    assert install.endswith("msgspec")
    status, asked = call("day1.sh", tmp_path, missing=1, refused=3)
    assert (status, "pip install" in asked[-1]) == (3, True), "it went on without"


@pytest.mark.parametrize("status", [1, 2])
def test_the_exit_status_is_that_of_the_checks(tmp_path: Path, status: int) -> None:
    assert call("day1.sh", tmp_path, status=status)[0] == status


def test_what_takes_too_long_is_ended_and_what_was_found_is_kept(tmp_path: Path) -> None:
    assert call("day1.sh", tmp_path, long=600, most=1)[0] == 124
    assert (tmp_path / "out" / "log.txt").read_text(encoding="utf-8") == "a finding\n"


def test_the_second_call_runs_its_steps_within_their_time_and_none_of_them_twice(tmp_path: Path) -> None:
    _, asked = call("day2.sh", tmp_path, most=400)
    assert sum("bundled model" in line for line in asked) == 1
    assert sum("bench --model" in line for line in asked) == 8
    assert {line.split()[-1] for line in asked if "bench steps" in line} == {"int8", "int4", "fp8"}
    seeds = [line.split()[-1] for line in asked if "--seed" in line]
    assert len(set(seeds)) == len(seeds) == 8
    assert (tmp_path / "out" / "bundled.log").read_text(encoding="utf-8") == "a finding\n"
    (tmp_path / "out" / "bundled.log").unlink()
    _, again = call("day2.sh", tmp_path, most=400)
    assert not any("bench" in line for line in again), "what was done is done"
    assert (tmp_path / "out" / "bundled.log").read_text(encoding="utf-8") == "a finding\n"


def test_a_step_that_fails_fails_the_second_call_and_the_others_go_on(tmp_path: Path) -> None:
    status, asked = call("day2.sh", tmp_path, slow="bundled", status=1, most=400)
    assert status == 1
    assert sum("bench --model" in line for line in asked) == 8
    _, again = call("day2.sh", tmp_path, most=400)
    assert any("bundled model" in line for line in again), "what failed is run again"


def test_steps_for_which_there_is_no_time_are_left_out(tmp_path: Path) -> None:
    _, asked = call("day2.sh", tmp_path, most=5)
    assert not any("bench" in line for line in asked)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("script", ["day1.sh", "day2.sh"])
def test_without_a_gpu_the_call_says_so(script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", SCRIPTS / script, tmp_path],
        env={**os.environ, "PYTHON": sys.executable, "KEPT": str(tmp_path / "kept")},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 2
    assert "GPU" in done.stdout


def test_what_travels_is_counted_without_the_weights_that_stay(tmp_path: Path, capsys) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "a.whl").write_bytes(bytes(1000))
    found = travels.travels(travels.ROOT, [tmp_path / "wheels"])
    assert found.pop(f"{tmp_path / 'wheels'}, carried") == 1000
    assert sum(found.values()) < 24 << 20, "the tree has grown; wheels take 20 MB of the 64 MiB"
    assert travels.main([], most=1) == 1
    assert travels.main([]) == 0
    assert "in all, at most 64" in capsys.readouterr().out
