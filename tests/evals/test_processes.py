"""What a process and others have of the machine, by what the system tells."""

import os
from pathlib import Path

import pytest

from personae.evals.processes import Others, memory_of, processor_of

TICKS = os.sysconf("SC_CLK_TCK")


def write(proc: Path, pid: int, parent: int, seconds: float, kilobytes: int = 0) -> None:
    """A process that has computed for so long, half of it in the system."""
    folder = proc / f"{pid}"
    folder.mkdir(exist_ok=True)
    half = int(seconds * TICKS / 2)
    (folder / "stat").write_text(f"{pid} (a (b) c) S {parent} 0 0 0 0 0 0 0 0 0 {half} {half} 7 7 20 0")
    (folder / "status").write_text(f"Name:\tx\nPid:\t{pid}\nPPid:\t{parent}\nVmRSS:\t{kilobytes} kB\n")


def write_machine(proc: Path, busy: float, idle: float) -> None:
    """All processors together."""
    (proc / "stat").write_text(f"cpu {int(busy * TICKS)} 0 0 {int(idle * TICKS)} 0 0 0 0 0 0\ncpu0 1 2\n")


def test_a_server_is_its_process_and_the_children_of_that(tmp_path: Path) -> None:
    write(tmp_path, 10, 1, 2.0, kilobytes=100)
    write(tmp_path, 11, 10, 4.0, kilobytes=20)
    write(tmp_path, 12, 11, 8.0, kilobytes=3)
    assert processor_of(10, proc=tmp_path) == 6.0
    assert processor_of(10, 11, proc=tmp_path) == 14.0, "each of them once"
    assert memory_of(10, tmp_path) == 120 * 1024


def test_others_are_whoever_is_not_the_server_or_who_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    write_machine(tmp_path, busy=50, idle=50)
    write(tmp_path, os.getpid(), 1, 1)
    write(tmp_path, 10, os.getpid(), 4)
    write(tmp_path, 11, 10, 20)
    others = Others(10, tmp_path)
    now += 10
    write_machine(tmp_path, busy=66, idle=54)
    write(tmp_path, os.getpid(), 1, 2)
    write(tmp_path, 10, os.getpid(), 6)
    write(tmp_path, 11, 10, 28)
    assert others.share() == pytest.approx(0.25)
