"""The server needs none of Linux's own calls: it starts, answers and stops where there are none."""

import json
import re
from pathlib import Path

import httpx
import pytest
from patience import PATIENCE
from programs import ROOT, Program

from personae.kernels.memory_file import memory_file, nameless_file, open_memory_file

WITHOUT_LINUX = (
    ROOT / "tests" / "support" / "other_posix"
)  # its sitecustomize.py is in every process of the server
ASKED = [
    ({}, r"I am the Personae demo"),
    ({"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}}, r"yes|no"),  # in a process of its own
    (
        {  # checked for each token, in another process
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "a",
                    "strict": True,
                    "schema": {
                        "type": "object",
                        "properties": {
                            "a": {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}}
                        },
                        "required": ["a"],
                        "additionalProperties": False,
                    },
                },
            }
        },
        r"\{",
    ),
]


def test_without_linux_s_calls_the_server_starts_answers_and_stops(tmp_path: Path) -> None:
    (nothing := tmp_path / "empty").mkdir()
    arguments = ("serve", "demo", "--port", "0", "--data-dir", str(tmp_path / "data"))
    path = f"{WITHOUT_LINUX}:{ROOT / '.pkg'}"
    env = {"PYTHONPATH": path, "PATH": str(nothing), "CXX": ""}  # kernels are not compiled for it
    with Program("-m", "personae", *arguments, env=env) as server:
        ready = re.match(r"personae ready (\S+)", server.line())
        assert ready, server.errors
        for fields, wanted in ASKED:
            body = {
                "messages": [{"role": "user", "content": "Who are you?"}],
                "temperature": 0,
                "max_tokens": 24,
            }
            answer = httpx.post(f"{ready[1]}/v1/chat/completions", json={**body, **fields}, timeout=PATIENCE)
            assert answer.status_code == 200, answer.text
            content = answer.json()["choices"][0]["message"]["content"]
            assert re.match(wanted, content), content
        assert set(json.loads(content)["a"]) <= {1, 2}
        server.process.terminate()
        server.end(0)
        assert "Traceback" not in server.errors


def test_nothing_of_linux_is_left_there() -> None:
    code = (
        "import os, ctypes, pathlib, socket\n"
        "assert not hasattr(os, 'memfd_create') and not pathlib.Path('/proc/self').exists()\n"
        "assert not hasattr(ctypes.CDLL(None), 'prctl')\n"
        "from personae.actors.keeping import Keeper\n"
        "try: socket.socket(socket.AF_UNIX).bind('\\0personae')\n"
        "except FileNotFoundError: print('none')\n"
    )
    path = f"{WITHOUT_LINUX}:{ROOT / '.pkg'}"
    with Program("-c", code, env={"PYTHONPATH": path}) as program:
        assert program.end(0) == "none\n"


@pytest.mark.parametrize("linux", [True, False])
def test_a_file_without_a_name_is_the_same_elsewhere(linux: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not linux:
        monkeypatch.delattr("os.memfd_create")
    with open(nameless_file(100), "rb") as file:
        assert file.read() == bytes(100)
    with open(open_memory_file(b"abc"), "rb") as file:
        assert file.read() == b"abc"
    with memory_file(b"secret") as path:
        assert Path(path).read_bytes() == Path(path).read_bytes() == b"secret"
        assert Path(path).stat().st_mode & 0o077 == 0 or linux
    assert linux or not Path(path).exists()
