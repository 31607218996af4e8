"""The benchmark for GPUs, end to end on one made of paper, so that its one call on a real one does not end
early."""

import itertools
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import PATIENCE

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available(),
    reason="needs Triton's compiler, and no GPU",
)
from paper_gpu import Late, PaperGpu  # noqa: E402  # below the mark, which says what they need
from paper_kit import double_events, shrink  # noqa: E402

from personae.evals.bench.gpu import __main__ as bench  # noqa: E402
from personae.evals.bench.gpu import checks, repeats, served, shapes, tables, timing  # noqa: E402
from personae.kernels import registry  # noqa: E402

ROOT = Path(__file__).parents[3]
PAPER_PYTHON = f"""#!/bin/sh
exec {sys.executable} {ROOT}/tests/support/paper_python.py "$@"
"""


@pytest.fixture(autouse=True)
def _doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


def on_paper(gpu: PaperGpu, monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> tuple[int, dict]:
    """Its exit status and report."""
    double_events(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(folder), "--seed", "5", *options])
    status = bench.main()
    assert (folder / "gpu.md").read_text(encoding="utf-8").startswith("#")
    return status, json.loads((folder / "gpu.json").read_text(encoding="utf-8"))


def on_paper_in_a_call(folder: Path, script: str, *arguments: str, **environment: str) -> Any:
    """The script's process, ended."""
    programs = folder / "programs"
    programs.mkdir()
    for name, text in {"python": PAPER_PYTHON, "compute-sanitizer": "#!/bin/sh\n"}.items():
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o755)
    own = {"PYTHON": str(programs / "python"), "KEPT": str(folder / "kept"), "MOST": "1000"}
    own["PATH"] = f"{programs}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", ROOT / "evals/bench/gpu" / script, folder / "out", *arguments],
        env={**os.environ, **own, **environment},
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
    )


@pytest.mark.long
def test_the_second_call_serves_a_made_model_and_tells_which_goals_are_met(tmp_path: Path) -> None:
    small = {"SHAPE": "--tiny", "DEVICE": "cpu", "PROMPT": "16", "ANSWER": "48", "CLIENTS": "2", "BOUND": "2"}
    done = on_paper_in_a_call(tmp_path, "day2.sh", **small)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "out" / "summary.md").read_text(encoding="utf-8")
    assert "| requests that failed | 0 | 0.00 | pass |" in text
    assert "| 64 rows of 64 adapters of rank 16 | 31 % |  | not measured |" in text
    served = text.split("## Served")[1].split("##")[0]
    assert [line.split(" | ")[0] for line in served.splitlines()[4:7]] == ["| adapters", "| base", "| bound"]
    peer = json.loads((tmp_path / "out" / "transformers.json").read_text(encoding="utf-8"))
    assert {row["adapters"] for row in peer} == {"none", "one", "mixed"}
    assert all(row["tokens/s"] > 0 for row in peer)


@pytest.mark.long
def test_the_first_call_passes_all_checks_where_kernels_are_their_references(tmp_path: Path) -> None:
    done = on_paper_in_a_call(tmp_path, "day1.sh", "--seconds", "0", "--seed", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    # SGMV alone; a layer with shrink behind the product, and beside; steps of an engine, the second of base
    # rows; one of an engine that lends.
    assert "captures: 1 1 2 2 1 2 2" in done.stdout
    for folder in ("out", "kept/found"):
        report = json.loads((tmp_path / folder / "gpu.json").read_text(encoding="utf-8"))
        assert len(report["checks"]) > 40
        assert all(check["passed"] for check in report["checks"])
        assert list(report["tables"].values()) == [[{"left out": "no time left"}]] * 9
    first = json.loads((tmp_path / "out/first/gpu.json").read_text(encoding="utf-8"))
    assert first["checks"]


def test_a_part_that_fails_is_a_failed_check_and_the_others_go_on(monkeypatch, tmp_path: Path) -> None:
    def first():
        yield checks.Check("whole", 0.0, 1.0)
        raise RuntimeError("an illegal\nmemory access")

    parts = [("first", first), ("second", lambda: [checks.Check("other", 0.0, 1.0)])]

    monkeypatch.setattr(bench, "check_parts", lambda *_: parts)
    monkeypatch.setattr(bench, "table_parts", lambda *_: {"Steps": lambda: [{"us": 1.0}]})
    with PaperGpu() as gpu:
        status, report = on_paper(gpu, monkeypatch, tmp_path)
    names = [check["name"] for check in report["checks"]]
    assert names == ["whole", "first: RuntimeError: an illegal memory access", "other"]
    assert [check["passed"] for check in report["checks"]] == [True, False, True]
    assert report["tables"] == {"Steps": [{"us": 1.0}]}
    assert status == 1


def test_a_part_that_spoils_the_device_is_a_failed_check_and_the_others_go_on_in_a_new_process(
    monkeypatch, tmp_path: Path
) -> None:
    epochs: list[list[str]] = []
    begun: list[str] = []

    def spoils():
        begun.append("first")
        yield checks.Check("whole", 0.0, 1.0)
        monkeypatch.setattr(torch.cuda, "synchronize", refuse)
        refuse()

    def refuse(device: object = None) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def again(path: str, arguments: list[str]) -> None:
        epochs.append([path, *arguments])
        raise SystemExit

    def other():
        begun.append("second")
        yield checks.Check("other", 0.0, 1.0)

    monkeypatch.setattr(bench, "check_parts", lambda *_: [("first", spoils), ("second", other)])
    monkeypatch.setattr(bench, "table_parts", lambda *_: {"Steps": lambda: [{"us": 1.0}]})
    monkeypatch.setattr(os, "execv", again)
    with PaperGpu() as gpu, pytest.raises(SystemExit):
        on_paper(gpu, monkeypatch, tmp_path)
    ((path, own, *arguments),) = epochs
    assert (path, own, arguments[:2]) == (sys.executable, sys.executable, ["-m", "personae.evals.bench.gpu"])
    with PaperGpu() as gpu:
        status, report = on_paper(gpu, monkeypatch, tmp_path, *arguments[2:])
    assert begun == ["first", "second"]
    names = [check["name"] for check in report["checks"]]
    assert names == [
        "whole",
        "first: RuntimeError: CUDA error: an illegal memory access was encountered",
        "other",
    ]
    assert report["tables"] == {"Steps": [{"us": 1.0}]}
    assert (status, report["seed"]) == (1, 5)


def test_a_kernel_with_other_bits_on_another_run_fails(monkeypatch) -> None:
    count = itertools.count()

    def sometimes(x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return torch.full((len(x), weight.shape[1]), 1.0 if next(count) else 2.0, device=x.device)

    with PaperGpu():
        operators = {name: own.run for name, own in registry.operators("triton").items()}
        generator = torch.Generator("cuda").manual_seed(1)
        found = list(repeats.repeat_checks({**operators, "expert_linear": sometimes}, generator, fp8=False))
    assert [check.name for check in found if not check.passed] == ["the same bits again, experts"]
    assert len(found) == 10


def test_a_later_call_begins_the_part_anew_that_a_call_was_cut_off_in(monkeypatch, tmp_path: Path) -> None:
    class Cut(BaseException):
        pass

    cut = True

    def second():
        yield checks.Check("half", 0.0, 1.0)
        if cut:
            raise Cut
        yield checks.Check("whole", 0.0, 1.0)

    def table():
        yield {"us": 1.0}

    parts = [("first", lambda: [checks.Check("before", 0.0, 1.0)]), ("second", second)]
    monkeypatch.setattr(bench, "check_parts", lambda *_: parts)
    monkeypatch.setattr(bench, "table_parts", lambda *_: {"Steps": table})
    with PaperGpu() as gpu, pytest.raises(Cut):
        on_paper(gpu, monkeypatch, tmp_path)
    cut = False
    for seconds in ("0", "100"):  # the first of these has no time for tables
        with PaperGpu() as gpu:
            status, report = on_paper(gpu, monkeypatch, tmp_path, "--resume", "--seconds", seconds)
        assert [check["name"] for check in report["checks"]] == ["before", "half", "whole"]
        assert report["tables"] == {
            "Steps": [{"left out": "no time left"} if seconds == "0" else {"us": 1.0}]
        }
        assert (status, report["cut"]) == (0, None)


def test_a_part_that_does_not_end_is_a_failed_check_and_a_new_process_takes_over(tmp_path: Path) -> None:
    """The new one finds that there is no GPU here."""
    code = """
import sys, time, torch
from personae.evals.bench.gpu import __main__ as bench

torch.cuda.is_available = lambda: True
torch.cuda.empty_cache = lambda: time.sleep(1000)
torch.cuda.get_device_name = lambda: "a GPU"
bench.copy_bandwidth = bench.product_rate = lambda: 1e6
bench.LONGEST = 0.1
bench.measure = lambda findings, seconds, seed, only: findings.part("endless", list, print)
bench.main()
"""
    command = [sys.executable, "-c", code, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, "no CUDA GPU" in done.stderr) == (2, True), done.stderr
    (check,) = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["checks"]
    assert check["name"] == "endless: it has not ended after 0 s"
    assert not check["passed"]


def test_it_needs_no_packages_but_those_that_it_names() -> None:
    """Others may be missing on a machine that has a GPU and no registry."""
    code = (
        "import sys, personae.evals.bench.gpu.__main__\nprint(*{name.split('.')[0] for name in sys.modules})"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    others = {
        "anyio",
        "greenlet",
        "jsonschema_rs",
        "llguidance",
        "starlette",
        "tokenizers",
        "uvicorn",
        "xgrammar",
    }
    assert others.isdisjoint(found.stdout.split())
    assert {"msgspec", "torch"} <= set(found.stdout.split())


def test_all_tables_are_made(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "check_parts", lambda *_: ())
    monkeypatch.setattr(tables, "mixes", lambda batch, seed: shapes.mixes(batch, seed)[-1:])
    with PaperGpu(139 << 30, blank=True, granule=1 << 14) as gpu:
        _, report = on_paper(gpu, monkeypatch, tmp_path)
    assert report["checks"] == []
    for title, rows in report["tables"].items():
        assert len(rows) > 1, title
        assert not any("left out" in row for row in rows), title


def test_what_is_timed_waits_for_the_inputs_that_are_still_being_made(monkeypatch) -> None:
    seen: list[torch.Tensor] = []
    with PaperGpu(late=Late.MAIN):
        for name in ("CUDAGraph", "Event", "Stream"):
            monkeypatch.setattr(timing, name, getattr(torch.cuda, name))
        x = torch.zeros(4, device="cuda").fill_(1.0)
        timing.replay_time([lambda: seen.append(x.clone())], 1)
        first = seen[0].cpu().tolist()
    assert first == [1.0] * 4


@pytest.mark.long
def test_answers_go_on_where_a_rows_mask_comes_late(monkeypatch) -> None:
    monkeypatch.setattr(served, "PROMPTS", {"short": 7})
    model, adapters = served.DEMO / "model", served.DEMO / "adapters"
    truth = served.engine_answers("cpu", model, adapters)
    with PaperGpu(4 << 30):
        found = served.engine_answers("cuda", model, adapters)
    assert found == truth
