"""Engine cores that wait for a new frontend: whom they obey, and what a frontend does with each of them."""

import os
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from programs import Program
from tiny_adapters import make_adapter_folder
from tiny_models import model_folder

from personae.actors import keeping
from personae.actors.enginecore import kept
from personae.actors.enginecore.kept import KeptCore, NewFrontend
from personae.actors.enginecore.step_recorder import StepRecorder
from personae.actors.keeping import END, TAKE, Keeper, take_over
from personae.actors.options import EngineOptions
from personae.actors.wire import Keep

TICKET, FINGERPRINT = b"t" * 32, b"f" * 32

WAITS = """
import sys
from pathlib import Path
from personae.actors.enginecore.kept import KeptCore
from personae.actors.wire import Keep

core = KeptCore.open(Keep(120.0, Path(sys.argv[1]), b"t" * 32, b"f" * 32))
print("waits", flush=True)
found = core.wait()
if found is not None:
    print("taken over", flush=True)
    while data := found.line.recv(100):
        found.line.sendall(data)
core.close()
"""

SILENT = """
import socket, sys, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1] + "/silent.sock")
listener.listen()
print("waits", flush=True)
time.sleep(120)
"""


class Waiting(threading.Thread):
    """An engine core that waits, in a thread."""

    def __init__(self, core: KeptCore) -> None:
        super().__init__(daemon=True)
        self.core = core
        self.found: list[NewFrontend | None] = []
        self.start()

    def run(self) -> None:
        self.found.append(self.core.wait())

    def end(self) -> NewFrontend | None:
        self.join(PATIENCE)
        self.core.close()
        (found,) = self.found
        return found


@pytest.fixture
def core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeptCore:
    monkeypatch.setattr(kept, "redirect_output", os.close)  # else it would be that of the tests
    core = KeptCore.open(Keep(PATIENCE, tmp_path, TICKET, FINGERPRINT))
    assert core is not None
    return core


def connect(folder: Path) -> socket.socket:
    (path,) = folder.glob("*.sock")
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(PATIENCE)
    with keeping.short_path(folder) as short:
        connection.connect(f"{short}/{path.name}")
    return connection


def test_a_wrong_ticket_a_cut_one_and_an_order_without_files_change_nothing(core, tmp_path) -> None:
    waiting = Waiting(core)
    with connect(tmp_path) as stranger:
        stranger.sendall(b"x" * 32)
        assert stranger.recv(1) == b"", "it is told nothing"
    with connect(tmp_path) as cut:
        cut.sendall(TICKET[:20])
    with connect(tmp_path) as fileless:
        fileless.sendall(TICKET)
        assert fileless.recv(32) == FINGERPRINT
        fileless.sendall(TAKE)
        assert fileless.recv(1) == b""
    with connect(tmp_path) as friend, open(os.devnull, "wb") as output:
        friend.sendall(TICKET)
        assert friend.recv(32) == FINGERPRINT
        recorder, file = StepRecorder.create()
        socket.send_fds(friend, [TAKE], [output.fileno(), file])
        os.close(file)
        found = waiting.end()
        assert found is not None
        friend.sendall(b"start")
        assert found.line.recv(5) == b"start"
        found.line.close()
    assert list(tmp_path.iterdir()) == []
    assert recorder.read() is None


def test_a_peer_that_says_nothing_is_not_waited_for(core, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(kept, "PEER_SECONDS", 0.05)
    waiting = Waiting(core)
    with connect(tmp_path) as silent:
        assert silent.recv(1) == b""
    with connect(tmp_path) as friend:
        friend.sendall(TICKET)
        assert friend.recv(32) == FINGERPRINT
        friend.sendall(END)
        assert waiting.end() is None


def test_an_engine_core_that_cannot_listen_is_not_kept(tmp_path, caplog) -> None:
    assert KeptCore.open(Keep(PATIENCE, tmp_path / "nowhere", TICKET, FINGERPRINT)) is None
    assert "can't listen" in caplog.text


def test_a_frontend_takes_the_engine_that_it_wants_and_ends_those_that_it_does_not(tmp_path) -> None:
    folder = tmp_path / ("long " * 30)  # too long a path for a Unix socket
    folder.mkdir()
    wanted = Keep(60.0, folder, TICKET, FINGERPRINT)
    with Program("-c", WAITS, str(folder)) as one, Program("-c", WAITS, str(folder)) as other:
        assert (one.line(), other.line()) == ("waits\n", "waits\n")
        assert take_over(folder, b"x" * 32, [wanted]) == [None], "they do not accept another ticket"
        (first,) = take_over(folder, TICKET, [wanted])
        assert first is not None
        assert first.pid in (one.process.pid, other.process.pid)
        taken, ended = (one, other) if first.pid == one.process.pid else (other, one)
        ended.end(0)
        first._connection.settimeout(PATIENCE)
        first._connection.sendall(b"hello")
        assert first._connection.recv(5) == b"hello"
        assert first._output.recv(100) == b"taken over\n"
        first.close()
        taken.end(-9)
    assert len(list(folder.iterdir())) == 1, "the one that was killed could not remove its name"
    assert take_over(folder, TICKET, [wanted]) == [None]
    assert list(folder.iterdir()) == []


def test_an_engine_that_does_not_answer_is_killed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(keeping, "ANSWER_SECONDS", 0.2)
    with Program("-c", SILENT, str(tmp_path)) as silent:
        assert silent.line() == "waits\n"
        assert take_over(tmp_path, TICKET, [Keep(60.0, tmp_path, TICKET, FINGERPRINT)]) == [None]
        silent.end(-9)


def fingerprint(options: EngineOptions, folder: Path, secret: bytes = b"s", **environment: str) -> bytes:
    return Keeper(folder, secret, 60.0).keep(["engine"], environment, options).fingerprint


def test_the_fingerprint_depends_on_options_files_environment_and_secret(tmp_path, monkeypatch) -> None:
    base = model_folder("qwen3")
    make_adapter_folder(tmp_path / "adapters" / "poet", base, rank=4, seed=1)
    options = EngineOptions(base, (tmp_path / "adapters",), device="cpu")
    first = fingerprint(options, tmp_path)
    assert fingerprint(options, tmp_path, EDITOR="vi") == first
    assert fingerprint(replace(options, secret=b"another"), tmp_path) == first, "it is not sent to an engine"
    changes: list[dict[str, Any]] = [{"max_seqs": 7}, {"model": model_folder("llama")}, {"share": 2}]
    others = [fingerprint(replace(options, **change), tmp_path) for change in changes]
    others.append(fingerprint(options, tmp_path, OMP_NUM_THREADS="77"))
    others.append(fingerprint(options, tmp_path, b"another secret"))
    (tmp_path / "adapters" / "poet" / "README.md").write_text("changed")
    others.append(fingerprint(options, tmp_path))
    monkeypatch.setattr("personae.__version__", "0.0.1")
    others.append(fingerprint(options, tmp_path))
    assert len({first, *others}) == 1 + len(others)
