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
[ {cut} -gt 0 ] && [ "$(wc -l < {log})" -ge {cut} ] && kill -9 $(ps -o sid= $$) && exit
case "$*" in
    *"import msgspec"|*"import gguf") exit {missing} ;;
    *"import torch"*) exit {no_gpu} ;;
    *"pip list"*) exit 0 ;;
    *pip*) exit {refused} ;;
    *"--only sgmv, torch.bfloat16"*) exit {first} ;;
    *"personae serve"*) {serves} ;;
    *{slow}*) echo a finding; sleep {long}; exit {status} ;;
esac
"""

SERVES = "echo personae ready http://127.0.0.1:1 model=m; while sleep 0.1; do :; done"


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
    cut: int = 0,
) -> tuple[int, list[str]]:
    """The exit status, and what Python was asked in this call. cut: the script is killed at this question."""
    folder.mkdir(exist_ok=True)
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
        cut=cut,
        serves="exit 1" if slow == "serve" else SERVES,
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
        start_new_session=True,
    )
    return done.returncode, log.read_text(encoding="utf-8").splitlines()


def test_the_first_call_asks_one_operator_then_everything_and_keeps_the_log(tmp_path: Path) -> None:
    status, asked = call("day1.sh", tmp_path, "--seed", "7")
    assert status == 0
    kit = [line for line in asked if "bench.gpu" in line]
    found = tmp_path / "kept" / "found"
    assert kit == [
        f"-m personae.evals.bench.gpu --only sgmv, torch.bfloat16 --seconds 20 --out {found}/first",
        f"-m personae.evals.bench.gpu --seconds 170 --out {found} --seed 7",
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
    assert asked[-1].endswith(f"--out {tmp_path}/kept/found --resume")
    assert (tmp_path / "out" / "gpu.json").read_text(encoding="utf-8") == "{}"


def test_what_the_kernels_need_is_installed_from_the_wheels_that_were_brought(tmp_path: Path) -> None:
    status, asked = call("day1.sh", tmp_path, missing=1)
    assert status == 0
    first, second = [line for line in asked if "pip install" in line]
    assert "--no-index --no-deps --find-links build/gpu/wheels" in first
    assert (first.split()[-1], second.split()[-1]) == ("msgspec", "gguf")
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
    assert sum("personae serve" in line for line in asked) == 1, "one server for all loads"
    loads = [line.split() for line in asked if "bench --url" in line]
    assert len(loads) == 9
    seeds = [line[line.index("--seed") + 1] for line in loads]
    assert len(set(seeds)) == 9
    assert sum("--schema" in line for line in loads) == 1
    assert sum("transformers_peer" in line for line in asked) == 1
    assert asked[-1].endswith(f"gpu.goals {tmp_path}/out")
    assert (tmp_path / "out" / "bundled.log").read_text(encoding="utf-8") == "a finding\n"
    (tmp_path / "out" / "bundled.log").unlink()
    _, again = call("day2.sh", tmp_path, most=400)
    run = ("--only bundled", "gpu.model", "bench --url", "peer")
    assert not any(part in line for line in again for part in run), "what was done is done"
    assert (tmp_path / "out" / "bundled.log").read_text(encoding="utf-8") == "a finding\n"


@pytest.mark.parametrize("script", ["day2.sh", "day3.sh"])
@pytest.mark.parametrize("reached", [4, 8])
def test_a_call_that_is_cut_off_is_gone_on_with(script: str, reached: int, tmp_path: Path) -> None:
    """Killed as a machine's end kills it, wherever it is."""
    cut, _ = call(script, tmp_path, most=400, cut=reached)
    assert cut == -9
    finished = {path.stem for path in (tmp_path / "kept" / "done").iterdir()}
    for file in tmp_path.joinpath("out").glob("*.log"):
        file.unlink()
    _, again = call(script, tmp_path, most=400)
    marks = {"packages": "pip install", "model": f"gpu.model {tmp_path}/kept/8b", "bundled": "--only bundled"}
    for name in finished:
        assert not any(marks.get(name, f"/{name} ") in line for line in again), name
    logs = {path.stem for path in tmp_path.joinpath("out").glob("*.log")}
    assert finished <= logs


def test_a_step_that_fails_fails_the_second_call_and_the_others_go_on(tmp_path: Path) -> None:
    status, asked = call("day2.sh", tmp_path, slow="bundled", status=1, most=400)
    assert status == 1
    assert sum("bench --url" in line for line in asked) == 9
    _, again = call("day2.sh", tmp_path, most=400)
    assert any("bundled model" in line for line in again), "what failed is run again"


def test_a_server_that_does_not_start_fails_the_call_and_its_loads_are_left_out(tmp_path: Path) -> None:
    status, asked = call("day2.sh", tmp_path, slow="serve", status=1, most=400)
    assert status == 1
    assert not any("bench --url" in line for line in asked)
    assert any("transformers_peer" in line for line in asked)


def test_the_further_list_runs_whole_or_by_name_and_refuses_what_is_not_on_it(tmp_path: Path) -> None:
    _, asked = call("day3.sh", tmp_path, most=400)
    served = [line for line in asked if "personae serve" in line]
    for option in (
        "--quantize fp8",
        "--quantize int4",
        "--kv-cache-dtype fp8",
        "--speculate ngram",
        "--kv-disk",
    ):
        assert sum(option in line for line in served) == 1, option
    assert sum("/64/adapters" in line for line in served) == 1
    status, asked = call("day3.sh", tmp_path / "other", "int8", "nonsense", most=400)
    assert status == 1
    assert [line.split("--quantize ")[1] for line in asked if "personae serve" in line] == ["int8"]


def test_steps_for_which_there_is_no_time_are_left_out(tmp_path: Path) -> None:
    _, asked = call("day2.sh", tmp_path, most=5)
    assert [line for line in asked if "bench" in line] == [asked[-1]], "only the summary"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("script", ["day1.sh", "day2.sh", "day3.sh"])
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
