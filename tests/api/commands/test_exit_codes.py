"""The exit codes of commands: 1 where a command failed, 2 where the command line is wrong or names what
cannot be used."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from live_server import serving
from typer.testing import CliRunner

from personae.api.app import create_app
from personae.api.cli import app
from personae.api.commands.command_line import exit_code
from personae.errors import EngineLost, LoadError, NotFound, PersonaeError, RequestError, StorageFailed

NOBODY = "http://127.0.0.1:9"
ASK_A_SERVER = (
    "ps",
    "chat",
    "launch claude",
    "usage",
    "tenants list",
    "keys list",
    "adapters list",
    "adapters remove poet",
    "adapters alias support poet=1",
)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(create_app(FakeEngine())) as url:
        yield url


@pytest.fixture
def claude(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "claude").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


def code(line: str) -> int:
    result = CliRunner().invoke(app, shlex.split(line))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code


@pytest.mark.usefixtures("claude")
@pytest.mark.parametrize("line", ASK_A_SERVER)
def test_a_server_that_does_not_answer_is_1(line: str) -> None:
    assert code(f"{line} --url {NOBODY}") == 1


@pytest.mark.parametrize("line", ["adapters versions nobody", "launch claude --model nobody"])
@pytest.mark.usefixtures("claude")
def test_a_server_that_refuses_is_1(line: str, address: str) -> None:
    assert code(f"{line} --url {address}") == 1


@pytest.mark.parametrize(
    "line",
    [
        "ps --nonsense",
        "launch emacs",
        "show no/such/folder",
        "adapters push no/such/folder",
        "adapters push one two --name both",
        "adapters alias support poet",
        f"tenants list --url {NOBODY} --data-dir .",
        "tenants list --data-dir no/such/folder",
        "check-template no/such/file",
        "bench --cell nothing",
    ],
)
def test_a_command_line_that_is_wrong_or_names_what_cannot_be_used_is_2(line: str) -> None:
    assert code(line) == 2


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (LoadError("no such model"), 2),
        (RequestError("not a number", param="weight"), 2),
        (RequestError("no answer"), 1),
        (NotFound("no adapter", param="name"), 1),
        (StorageFailed("the disk is full"), 1),
        (PersonaeError("something"), 1),
        (EngineLost("it failed too often"), 3),
    ],
)
def test_an_error_has_its_exit_code(error: PersonaeError, expected: int) -> None:
    assert exit_code(error) == expected
