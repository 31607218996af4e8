"""Uploads that are checked in a process of their own."""

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from uploads import BOUNDS, CONFIG, TENSORS, config, whole

from personae.api.adapters.checker import ProcessChecker, ThreadChecker
from personae.errors import AdapterError, RequestFailed
from personae.lora.bounds import AdapterBounds

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])]
STORING = AdapterBounds(BOUNDS.shapes, BOUNDS.max_rank, BOUNDS.max_value, stored="F32")


@pytest.fixture
def checker(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessChecker]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3] / ".pkg"))
    with closing(ProcessChecker()) as checker:
        yield checker


def folder(path: Path, **files: bytes) -> Path:
    path.mkdir()
    for name, content in {**whole(), CONFIG: files.get("config", config())}.items():
        (path / name).write_bytes(content)
    return path


async def test_a_process_finds_what_a_thread_finds_and_writes_the_same_file(
    checker: ProcessChecker, tmp_path: Path
) -> None:
    here, there = folder(tmp_path / "here"), folder(tmp_path / "there")
    found = await ThreadChecker().check(here, STORING, None)
    assert await checker.check(there, STORING, None) == found
    assert found.bytes == sum(file.stat().st_size for file in here.iterdir())
    assert {file.name: file.read_bytes() for file in here.iterdir()} == {
        file.name: file.read_bytes() for file in there.iterdir()
    }


async def test_a_folder_that_would_grow_beyond_its_quota_stays_as_it_was_uploaded(
    checker: ProcessChecker, tmp_path: Path
) -> None:
    path = folder(tmp_path / "adapter")
    found = await checker.check(path, STORING, 1000)
    assert found.bytes > 1000
    assert {file.name for file in path.iterdir()} == {CONFIG, TENSORS}


async def test_a_refused_adapter_is_refused_with_the_field_and_the_process_goes_on(
    checker: ProcessChecker, tmp_path: Path
) -> None:
    bad = folder(tmp_path / "bad", config=config(rank=3))
    with pytest.raises(AdapterError) as process:
        await checker.check(bad, BOUNDS, None)
    with pytest.raises(AdapterError) as thread:
        await ThreadChecker().check(bad, BOUNDS, None)
    assert (process.value.message, process.value.param) == (thread.value.message, thread.value.param)
    assert process.value.param is not None
    first = pid(checker)
    assert (await checker.check(folder(tmp_path / "good"), BOUNDS, None)).ranks == {"q": 2, "v": 2}
    assert pid(checker) == first


async def test_a_process_that_was_killed_is_replaced(checker: ProcessChecker, tmp_path: Path) -> None:
    path = folder(tmp_path / "adapter")
    found = await checker.check(path, BOUNDS, None)
    first = pid(checker)
    os.kill(first, signal.SIGKILL)
    wait_for_end(first)
    assert await checker.check(path, BOUNDS, None) == found
    assert pid(checker) != first


async def test_a_process_without_work_ends_and_the_next_upload_starts_another(
    checker: ProcessChecker, tmp_path: Path
) -> None:
    path = folder(tmp_path / "adapter")
    with closing(ProcessChecker(idle_seconds=0.0)) as impatient:
        found = await impatient.check(path, BOUNDS, None)
        first = pid(impatient)
        wait_for_end(first)
        assert await impatient.check(path, BOUNDS, None) == found
        assert pid(impatient) != first


async def test_a_process_that_dies_of_an_adapter_is_said_with_its_exit_code(
    checker: ProcessChecker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder(tmp_path / "adapter")
    await checker.check(path, BOUNDS, None)
    send = checker._line.sendall
    victim = pid(checker)

    class Killing:
        def sendall(self, data: bytes) -> None:
            os.kill(victim, signal.SIGKILL)
            send(data)

        def __getattr__(self, name: str) -> object:
            return getattr(line, name)

    line = checker._line
    monkeypatch.setattr(checker, "_line", Killing())
    with pytest.raises(RequestFailed, match="exit code -9"):
        await checker.check(path, BOUNDS, None)
    assert (await checker.check(path, BOUNDS, None)).ranks


def pid(checker: ProcessChecker) -> int:
    assert checker._process is not None
    return checker._process.pid


def wait_for_end(process: int) -> None:
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
