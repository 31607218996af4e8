"""The memory and processor time of a server and of other processes on a Linux machine."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")


def memory_of(pid: int, proc: Path = _PROC) -> int:
    """Bytes that a process and its children hold."""
    total = 0
    for status in _read_all(proc, "status"):
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        if pid in (int(fields["Pid"]), int(fields["PPid"])):
            total += int(fields.get("VmRSS", "0 kB").split()[0]) * 1024
    return total


def processor_of(*pids: int, proc: Path = _PROC) -> float:
    """Processor seconds of processes and their children."""
    total = 0
    for stat in _read_all(proc, "stat"):
        number, _, rest = stat.partition(" ")
        fields = rest.rpartition(")")[2].split()
        if int(number) in pids or int(fields[1]) in pids:
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


class Others:
    """All processes except the servers and this one, from now on. Wall-clock times depend on them."""

    def __init__(self, server: int, proc: Path = _PROC) -> None:
        self._server = server
        self._proc = proc
        self._since, self._begun = self._had(), time.monotonic()

    def share(self) -> float:
        """Their share of all processors, from 0 to 1."""
        seconds = max(time.monotonic() - self._begun, 0.01)
        return max(self._had() - self._since, 0.0) / seconds / (os.cpu_count() or 1)

    def _had(self) -> float:
        first = (self._proc / "stat").read_text().partition("\n")[0]
        user, nice, system, _, _, *rest = map(int, first.split()[1:9])  # idle, and waiting for a disk
        busy = (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
        return busy - processor_of(self._server, os.getpid(), proc=self._proc)


def _read_all(proc: Path, file: str) -> Iterator[str]:
    for path in proc.glob(f"[0-9]*/{file}"):
        try:
            yield path.read_text()
        except OSError:  # it has ended
            continue
