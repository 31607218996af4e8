"""Where the programs of tests/clients are, and what runs them."""

import os
import shutil
import sys
from pathlib import Path

import pytest

CLIENTS = Path(__file__).resolve().parents[1] / "clients"
_OWN = CLIENTS.parents[1] / ".venv" / "clients"
_REQUIRED = os.environ.get("PERSONAE_CLIENTS") == "required"


def missing(why: str) -> None:
    """Skip, or fail where the clients have to be there."""
    if _REQUIRED:
        pytest.fail(f"PERSONAE_CLIENTS=required: {why}")
    pytest.skip(why)


def interpreter(home: str) -> str:
    """What runs a client's programs; without it the test is skipped."""
    if home == "":
        return sys.executable
    if home == "node":
        node = shutil.which("node")
        if node is None:
            pytest.skip("node is not found")
        if not (CLIENTS / "node" / "node_modules").is_dir():
            missing("tests/clients/node has no node_modules: `make clients` installs them")
        return node
    if not (_OWN / home / ".installed").exists():
        missing(f".venv/clients/{home} is not there: `make clients` makes it")
    return str(_OWN / home / "bin" / "python")
