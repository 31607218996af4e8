"""`personae launch` starts an agent on a running server."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from live_server import serving

from personae.api.app import create_app
from personae.api.commands.agents import prepared
from personae.errors import RequestError

ECHO = """#!/bin/sh
for each in "$@"; do echo "$each"; done
echo "$ANTHROPIC_BASE_URL $ANTHROPIC_MODEL $PERSONAE_API_KEY"
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(create_app(FakeEngine(max_model_len=40_000))) as url:
        yield url


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    """An environment in which both agents are installed; they tell what they got."""
    for name in ("claude", "codex"):
        (tmp_path / name).write_text(ECHO)
        (tmp_path / name).chmod(0o755)
    return {"PATH": f"{tmp_path}:/bin:/usr/bin"}


def launched(address: str, env: dict[str, str], *arguments: str) -> list[str]:
    program = [sys.executable, "-c", "from personae.api.cli import main; main()", "launch"]
    done = subprocess.run(
        [*program, *arguments[:1], "--url", address, *arguments[1:]],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **env},
    )
    return done.stdout.splitlines()


def test_claude_code_starts_with_the_server_in_its_environment(
    address: str, programs: dict[str, str]
) -> None:
    *arguments, env = launched(address, programs, "claude", "--key", "k", "--", "--continue", "hi there")
    assert arguments == ["--continue", "hi there"]
    assert env.split()[:2] == [address, "base"]


def test_codex_starts_with_the_server_as_its_provider(address: str, programs: dict[str, str]) -> None:
    *arguments, env = launched(
        address, programs, "codex", "--model", "team/pirate", "--key", "k", "--", "exec", "hi"
    )
    assert arguments[-2:] == ["exec", "hi"]
    assert 'model="team/pirate"' in arguments
    assert f'base_url="{address}/v1"' in arguments[5]
    assert env.split()[-1] == "k"


def test_what_cannot_be_started_says_why(address: str, programs: dict[str, str]) -> None:
    def why(name: str = "claude", url: str = address, model: str | None = None, **env: str) -> str:
        with pytest.raises(RequestError) as failed:
            prepared(name, (), url=url, model=model, key=None, env=programs | env)
        return str(failed.value)

    assert "there are claude, codex" in why("emacs")
    assert "npm install -g @anthropic-ai/claude-code" in why(PATH="/nowhere")
    assert "does not answer" in why(url="http://127.0.0.1:9")
    assert "there are base, team/pirate" in why(model="other")
    with serving(create_app(FakeEngine(max_model_len=8192))) as short:
        assert "needs a context of 32768 tokens, and that of base has 8192" in why(url=short)
