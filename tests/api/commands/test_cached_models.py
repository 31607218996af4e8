"""`personae pull`, `list`, `rm`, `ps` and `run`: each as a user types it."""

import io
import json
import sys
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from fake_hub import FakeHub
from live_server import serving
from programs import Program
from typer.testing import CliRunner

from personae.api.app import create_app
from personae.api.cli import app
from personae.api.commands import run as run_command

MODEL = {"config.json": b"{}", "model.safetensors": bytes(3000), "tokenizer.json": b"[1]"}
ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}


COMMANDS = """
import json, sys
from typer.testing import CliRunner
from personae.api.cli import app

done = [CliRunner().invoke(app, line.split()) for line in sys.argv[1:]]
print(json.dumps([(each.exit_code, each.output) for each in done]))
"""


def said(*lines: str) -> list[tuple[int, str]]:
    """The exit code and the output of each command, in one process: the library reads its environment
    once."""
    with Program("-c", COMMANDS, *lines) as program:
        return [(code, output) for code, output in json.loads(program.end(0))]


def test_what_is_pulled_is_listed_until_it_is_removed(hub: FakeHub) -> None:
    hub.add("org/model", MODEL | {"evil.py": b"raise SystemExit"})
    hub.add("org/lora", ADAPTER)
    done = said(
        *("list --json", "pull org/model", "pull org/lora", "list --json"),
        *("rm org/modle", "rm org/model@main", "rm org/model", "list"),
    )
    assert [code for code, _ in done] == [0, 0, 0, 0, 2, 2, 0, 0], done
    empty, model, _, listed, misspelt, revision, removed, rest = (output for _, output in done)
    assert json.loads(empty) == []
    found = {each["name"]: each for each in json.loads(listed)}
    kinds = {name: each["kind"] for name, each in found.items()}
    assert kinds == {"org/model": "model", "org/lora": "adapter"}
    assert found["org/model"]["bytes"] >= 3000
    assert "Did you mean org/model?" in misspelt
    assert "removes all of a repository" in revision
    assert removed.startswith("removed org/model: ")
    assert not Path(model.splitlines()[-1]).exists()
    assert rest.splitlines()[1].startswith("org/lora")
    assert not any(path.endswith("evil.py") for _, path, _ in hub.asked)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["pull", "llama"], "a model there is named org/name"),
        (["pull", "https://huggingface.co/org/name"], "named org/name"),
        (["rm", "../../etc"], "is no name on the Hub"),
        (["show", "no/such/folder"], "does not exist"),
    ],
)
def test_what_is_no_name_is_refused(arguments: list[str], why: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, why in " ".join(result.output.split())) == (2, True), result.output


def test_ps_shows_what_a_server_serves() -> None:
    with serving(create_app(FakeEngine())) as address:
        result = CliRunner().invoke(app, ["ps", "--url", address])
        assert result.exit_code == 0, result.output
        assert [line.split() for line in result.output.splitlines()] == [
            ["NAME", "BASE", "STATE", "CONTEXT"],
            ["base", "running", "512"],
            ["team/pirate", "base", "running", "512"],
        ]
        names = json.loads(CliRunner().invoke(app, ["ps", "--url", address, "--json"]).output)
        assert [each["id"] for each in names] == ["base", "team/pirate"]
    result = CliRunner().invoke(app, ["ps", "--url", address])
    assert (result.exit_code, "does not answer" in result.output) == (1, True)


SERVER = """
import sys
print("personae ready {address} model=base adapters=0", flush=True)
sys.stdin.read()
"""


def test_run_talks_to_a_server_of_its_own_and_stops_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []
    started = []
    popen = run_command.subprocess.Popen

    with serving(create_app(FakeEngine())) as address:

        def stand_in(command: list[str], **options: object) -> object:
            asked.append(command)
            program = [sys.executable, "-c", SERVER.format(address=address)]
            started.append(popen(program, stdin=run_command.subprocess.PIPE, **options))  # type: ignore[call-overload]  # as given
            return started[-1]

        monkeypatch.setattr(run_command.subprocess, "Popen", stand_in)
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/exit\n"))
        assert run_command.run("demo", ["--max-seqs", "4"]) == 0
    assert "Hello, world!" in capsys.readouterr().out
    assert asked[0][3:] == ["serve", "demo", "--port", "0", "--log-level", "warning", "--max-seqs", "4"]
    assert started[0].poll() is not None


def test_run_ends_with_the_code_of_a_server_that_does_not_start() -> None:
    assert run_command.run("no/such/model") == 2
