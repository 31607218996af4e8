"""`personae serve` whose frontend is killed: its engines wait for the next one, and no process stays."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENCE, eventually
from served_program import Served
from tiny_models import model_folder


def children(parent: int) -> list[int]:
    """The process ids of a process's children."""
    found = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True, timeout=PATIENCE)
    return [int(line) for line in found.stdout.split()]


def is_gone(pid: int) -> bool:
    """Whether a process has ended. Its exit code may still wait for a parent that reads it."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] == "Z"


class DataFolder:
    """Servers with one data folder, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engines: set[int] = set()

    def serve(self, *arguments: str, grace: str = "600") -> Served:
        """Start one. The grace is longer than any busy machine needs for the next start."""
        options = ("--device", "cpu", "--kv-memory", "64MiB", "--served-model-name", "base")
        options += ("--engine-grace", grace)
        model = str(model_folder("qwen3"))
        server = Served(model, *options, "--data-dir", str(self.folder), *arguments)
        assert server.url, server.end(0)
        self.engines.update(children(server.process.pid))
        return server


@pytest.fixture
def data(tmp_path: Path) -> Iterator[DataFolder]:
    data = DataFolder(tmp_path / "data")
    try:
        yield data
    finally:
        for pid in data.engines:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)


def kill(server: Served) -> None:
    server.process.send_signal(signal.SIGKILL)
    server.process.wait(PATIENCE)


def answer(server: Served) -> str:
    text: str = server.complete(max_tokens=32).json()["choices"][0]["text"]
    return text


def test_the_next_server_takes_over_the_engine_of_one_that_was_killed_and_ends_it_with_itself(data) -> None:
    with data.serve() as first:
        right = answer(first)
        (engine,) = children(first.process.pid)
        kill(first)
    with data.serve() as second:
        assert children(second.process.pid) == []
        assert answer(second) == right
        kill(second)
    with data.serve() as last:
        assert children(last.process.pid) == []
        assert answer(last) == right
        last.process.send_signal(signal.SIGTERM)
        last.end(0)
        assert f"took over the engine with process id {engine}" in last.errors
        assert is_gone(engine)


def test_all_replicas_are_taken_over_and_one_that_is_killed_then_is_replaced(data) -> None:
    with data.serve("--replicas", "2") as first:
        right = answer(first)
        engines = children(first.process.pid)
        kill(first)
    with data.serve("--replicas", "2") as second:
        assert children(second.process.pid) == []
        assert answer(second) == right
        os.kill(engines[0], signal.SIGKILL)
        eventually(lambda: len(children(second.process.pid)) == 1, "another engine is started")
        data.engines.update(children(second.process.pid))
        assert answer(second) == right
        second.process.send_signal(signal.SIGTERM)
        second.end(0)
        taken = re.findall(r"took over the engine with process id (\d+)", second.errors)
        assert sorted(map(int, taken)) == sorted(engines)
        assert all(map(is_gone, data.engines))


def test_an_engine_with_other_options_is_ended_and_another_one_is_started(data) -> None:
    with data.serve() as first:
        (engine,) = children(first.process.pid)
        kill(first)
    with data.serve("--max-seqs", "3") as second:
        assert is_gone(engine)
        assert len(children(second.process.pid)) == 1
        assert second.complete(max_tokens=8).status_code == 200


@pytest.mark.parametrize("grace", ["0", "0.5"])
def test_an_engine_that_nobody_takes_over_ends_after_its_grace(data, grace) -> None:
    with data.serve(grace=grace) as server:
        (engine,) = children(server.process.pid)
        kill(server)
    eventually(lambda: is_gone(engine), "the engine ends")
    assert list((data.folder / "engines").iterdir()) == []


def test_an_engine_that_was_told_to_end_does_so_when_its_server_is_killed(data) -> None:
    with data.serve() as server:
        (engine,) = children(server.process.pid)
        os.kill(engine, signal.SIGTERM)  # as a service manager does to all processes of a service
        assert server.complete(max_tokens=8).status_code == 200, "the server decides when its engine ends"
        kill(server)
    eventually(lambda: is_gone(engine), "the engine ends")
