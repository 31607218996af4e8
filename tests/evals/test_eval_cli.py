"""`personae eval`: the command, on the bundled model."""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_server import Running, running
from typer.testing import CliRunner, Result

from personae.api import bundled as bundled_models
from personae.api.bundled import NAMED
from personae.api.cli import app
from personae.api.options import ServeOptions
from personae.evals.harness.progress import Board
from personae.evals.harness.records import RESULTS, read_run
from personae.evals.harness.target import names_of
from personae.evals.suites.registry import ANY_MODEL, DEMO, FINETUNED, SUITES, default_suites, open_suite

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guide" / "evals.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(ServeOptions(NAMED, device="cpu")) as server:
        yield server


def personae(*arguments: str, cwd: Path) -> Result:
    """The command in this process."""
    with contextlib.chdir(cwd):
        return CliRunner().invoke(app, arguments)


def apart(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: other people's packages warn, which is an error in tests."""
    code = "from personae.api.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".pkg"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        timeout=300,
        check=False,
    )


def test_all_default_suites_run_against_a_server(server: Running, tmp_path: Path) -> None:
    small = ["--count", "1", "--set", "determinism.tokens=8", "--set", "determinism.requests=2"]
    small += ["--set", "determinism.others=3", "--set", "acceptance.every=6", "--set", "schemas.count=3"]
    small += ["--set", "schemas.limit=48", "--set", "reasoning.limit=32", "--set", "bfcl.limit=48"]
    models = ["--models", "base", "--models", "triage"]
    done = personae("eval", "run", "--url", server.url, "--out", "results", *models, *small, cwd=tmp_path)
    assert done.exit_code == 0, done.output
    run = read_run(tmp_path / "results")
    assert run.complete
    assert {record.suite for record in run.records} == set(DEMO)
    assert {record.model for record in run.records} == {"personae-demo", "triage"}
    assert not [record for record in run.records if record.error]
    skipped = {(record.suite, record.task) for record in run.records if record.skipped}
    assert skipped == {("lora", "logprobs"), ("determinism", "preempted"), ("determinism", "restarted")}
    same = [record for record in run.records if record.suite == "determinism" and record.judged]
    assert len(same) == 12
    assert all(record.passed for record in same)
    exact = [r for r in run.records if r.suite == "demo" and r.model == "triage" and r.mode == "constrained"]
    assert exact[0].scores == {"valid": 1.0, "well-formed": 1.0}
    html = (tmp_path / "results" / "report.html").read_text()
    assert all(f'id="{suite}"' in html for suite in DEMO)
    assert "| tool | personae-demo | free |" in (tmp_path / "results" / "report.md").read_text()


@pytest.mark.long
def test_an_engine_in_process_is_compared_with_peft_and_disturbed(tmp_path: Path) -> None:
    done = apart(
        *("eval", "run", "lora", "determinism", "--model", "demo", "--out", "results"),
        *("--models", "base", "--models", "verse"),
        *("--task", "logprobs", "--task", "preempted", "--task", "restarted"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    records = read_run(tmp_path / "results").records
    assert len(records) == 6 * 2 + 2
    assert all(record.passed for record in records), [record.note for record in records]
    assert all(r.values["disturbances"] >= 1 for r in records if r.suite == "determinism")
    assert all(r.values["largest difference"] < 1e-3 for r in records if r.suite == "lora")


def test_the_suites_that_are_run_by_default_are_those_for_what_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tuple(default_suites(["personae-demo", "verse"])) == DEMO
    assert tuple(default_suites(["qwen"])) == ANY_MODEL
    real = default_suites(["SmolLM2-135M-Instruct", *FINETUNED])
    assert "finetuned" in real
    assert "demo" not in real
    for name, settings in real.items():
        open_suite(name, settings)
    monkeypatch.setattr(bundled_models, "smollm2", lambda: tmp_path / "model.gguf")
    assert set(names_of(None, ())) == {"SmolLM2-135M-Instruct", *FINETUNED}
    assert names_of(NAMED, ())[0] == "personae-demo"
    monkeypatch.setattr(bundled_models, "smollm2", lambda: None)
    assert names_of(None, ())[0] == "personae-demo"


def test_a_setting_of_a_suite_chooses_the_models_that_it_asks(server: Running, tmp_path: Path) -> None:
    line = ("eval", "run", "demo", "bfcl", "--url", server.url, "--count", "1", "--out", "a")
    chosen = ("--task", "chat", "--task", "verse", "--task", "multiple", "--set", "bfcl.models=verse")
    done = personae(*line, *chosen, "--models", "base", "--models", "verse", cwd=tmp_path)
    assert done.exit_code == 0, done.output
    run = read_run(tmp_path / "a")
    assert run.head.base == "personae-demo"
    asked = {(record.suite, record.model) for record in run.records}
    assert asked == {("demo", "personae-demo"), ("demo", "verse"), ("bfcl", "verse")}
    wrong = personae(*line[:-1], "b", "--set", "bfcl.models=bard", cwd=tmp_path)
    assert wrong.exit_code == 2
    assert "'bard'" in wrong.output


def test_free_answers_are_those_of_transformers_and_peft(tmp_path: Path) -> None:
    done = apart(
        *("eval", "run", "finetuned", "--model", "demo", "--out", "results", "--count", "2"),
        *("--mode", "free", "--mode", "transformers", "--task", "verse", "--task", "triage"),
        *("--set", "finetuned.dtype=float32", "--set", "finetuned.limit=24"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    records = read_run(tmp_path / "results").records
    assert {record.model for record in records} == {"personae-demo", "triage", "verse"}
    answers = {(r.case, r.model, r.mode): r.answer for r in records}
    assert len(answers) == 2 * 2 * 2 * 2
    for (case, model, _), answer in answers.items():
        assert answers[case, model, "free"] == answer, (case, model)


def test_lm_evaluation_harness_asks_the_server(server: Running, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    tokenizer = ROOT / "evals" / "demo" / "model"
    done = apart(
        *("eval", "run", "lm_eval", "--url", server.url, "--out", "results", "--models", "base"),
        *("--count", "6", "--set", f"lm_eval.tokenizer={tokenizer}"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    records = read_run(tmp_path / "results").records
    by_task = {record.task: [r for r in records if r.task == record.task] for record in records}
    assert {task: len(parts) for task, parts in by_task.items()} == {
        "personae_which_tool": 6,
        "personae_repeat": 6,
        "personae_extract": 6,
    }
    assert all("acc" in record.scores for record in by_task["personae_which_tool"])
    assert sum(record.passed for record in records) >= 3


@pytest.mark.long
def test_one_of_our_lm_evaluation_tasks_runs_alone(server: Running, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    done = apart(
        *("eval", "run", "lm_eval", "--url", server.url, "--out", "results", "--models", "base"),
        *("--count", "2", "--set", "lm_eval.tasks=chat:personae_extract"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    records = read_run(tmp_path / "results").records
    assert [record.task for record in records] == ["personae_extract"] * 2
    assert all(record.judged for record in records)


def test_a_setting_that_is_a_list_takes_entries_with_commas() -> None:
    suite = open_suite("lm_eval", {"tasks": "completions:one,chat:two", "count": "3"})
    assert [case.task for case in suite.cases()] == ["one", "two"]


def test_the_terminal_shows_the_first_error_of_a_suite(server: Running, tmp_path: Path) -> None:
    line = ("eval", "run", "demo", "--url", server.url, "--count", "2", "--task", "chat", "--out", "a")
    done = personae(*line, "--set", "demo.limit=1000000", cwd=tmp_path)
    assert done.exit_code == 1
    [shown] = [line for line in done.output.splitlines() if line.startswith("demo: ")]
    first = next(record for record in read_run(tmp_path / "a").records if record.error)
    assert shown == f"demo: {first.case} with {first.model}: {first.error}"


def test_a_run_goes_on_and_is_compared(server: Running, tmp_path: Path) -> None:
    line = ("eval", "run", "demo", "--url", server.url, "--count", "2", "--task", "chat", "--out", "a")
    assert personae(*line, cwd=tmp_path).exit_code == 0
    lines = (tmp_path / "a" / RESULTS).read_text().splitlines(keepends=True)
    (tmp_path / "a" / RESULTS).write_text("".join(lines[:2]))
    again = personae(*line, cwd=tmp_path)
    assert again.exit_code == 2
    assert "--resume" in again.output
    assert personae(*line, "--resume", cwd=tmp_path).exit_code == 0
    assert len(read_run(tmp_path / "a").records) == 2
    delivered = personae("eval", "report", "a", "a", "--out", "both", cwd=tmp_path)
    assert delivered.stdout.split() == ["both/report.html", "both/report.md"]
    assert "a against a" in (tmp_path / "both" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nonsense"], "There is no suite 'nonsense'"),
        (["run", "demo", "--url", "http://127.0.0.1:1"], "cannot be reached"),
        (["run", "demo", "--set", "demo.colour=red"], "`demo.colour`"),
        (["run", "demo", "--set", "demo.count=many"], "count"),
        (["run", "demo", "--set", "count=1"], "SUITE.NAME=VALUE"),
        (["run", "demo", "--set", "bfcl.count=1"], "which is not run"),
        (["run", "demo", "--resume"], "--out"),
        (["run", "demo", "--serve", "--url", "http://x"], "--serve"),
        (["report", "nowhere"], "No such file"),
        (["run", "demo", "--serve", "--out", __file__], "--out"),
        (["report", ".", "--out", __file__], "--out"),
    ],
)
def test_a_wrong_option_is_named(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["eval", *arguments])
    assert result.exit_code == (1 if message == "cannot be reached" else 2)
    assert message in re.sub(r"\x1b\[[0-9;]*m", "", result.output)
    assert "Traceback" not in result.output
    assert not [*tmp_path.iterdir()], "a run that did not begin leaves nothing"


def test_a_run_that_breaks_off_keeps_what_it_has_and_says_how_it_goes_on(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    line = ("eval", "run", "demo", "--url", server.url, "--count", "2", "--task", "chat", "--out", "a")
    with monkeypatch.context() as patch:
        patch.setattr(Board, "count", interrupted)
        result = personae(*line, "--concurrency", "1", cwd=tmp_path)
    assert result.exit_code != 0
    assert "1 outcomes are in a; the same command with --resume goes on." in result.output
    assert personae(*line, "--resume", cwd=tmp_path).exit_code == 0
    assert len(read_run(tmp_path / "a").records) == 2


def test_the_suites_are_listed_with_their_settings() -> None:
    result = CliRunner().invoke(app, ["eval", "list"])
    assert result.exit_code == 0
    assert all(f"\n{name}: " in f"\n{result.output}" for name in SUITES)
    assert "--set demo.count=64" in result.output


def test_the_page_documents_every_suite_option_and_setting() -> None:
    listed = CliRunner().invoke(app, ["eval", "list"]).output
    assert all(f"| `{name}` |" in PAGE for name in SUITES)
    for suite, setting in re.findall(r"--set (\w+)\.(\w+)=", listed):
        if setting == "models":  # every suite's
            assert "`SUITE.models`" in PAGE
            continue
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{suite}` |"))
        assert f"`{setting}`" in row, f"{suite}.{setting}"
    options = re.findall(r"--[a-z-]+", CliRunner().invoke(app, ["eval", "run", "--help"]).output)
    assert all(f"`{option}" in PAGE or f"{option} " in PAGE for option in set(options) - {"--help"})


def test_the_pages_commands_run(server: Running, tmp_path: Path) -> None:
    """As they stand, but with the address and the model of this server, and smaller counts: seconds."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines() if line]
    assert len(lines) >= 4
    for line in lines:
        words = line.replace("http://127.0.0.1:8000", server.url).split()
        assert words[0] == "personae", line
        if words[1:3] == ["eval", "run"]:
            words = [{"8": "1", "finetuned": "demo"}.get(word, word) for word in words]
            words += ["--task", "chat"] if "--count" in words else []
        done = personae(*words[1:], cwd=tmp_path)
        assert done.exit_code == 0, f"{line}\n{done.output}"
    assert json.loads((tmp_path / "runs" / "before" / RESULTS).read_text().splitlines()[0])["type"] == "run"
