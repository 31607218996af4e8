"""Tests of the API hold when two HTTP workers serve it: the same files, run over the lines of workers."""

import os
import subprocess
import sys

from programs import ROOT

FILES = (
    "test_chat.py",
    "test_completions.py",
    "test_tools.py",
    "responses/test_stored.py",
    "responses/test_conversations.py",
    "responses/test_durable.py",
    "anthropic/test_client.py",
    "tenants/test_admin.py",
    "tenants/test_running.py",
)


def test_the_tests_of_the_api_hold_over_workers() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-k",
            "not trio",
            *(f"tests/api/{file}" for file in FILES),
        ],
        cwd=ROOT,
        env={**os.environ, "PERSONAE_TEST_HTTP_WORKERS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
