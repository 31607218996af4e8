"""The ranks of a stage on a node that the engine core's process is not on: they are started before the engine
core, which calls them (`engine/parallel/far_stages.py`)."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from threading import Thread

import msgspec

from personae.actors.cluster.contact import StageOrder
from personae.engine.parallel.far_stages import Address
from personae.engine.parallel.shared_file import new_shared_file
from personae.kernels.memory_file import open_memory_file

COMMAND = (sys.executable, "-m", "personae.engine.parallel.process", "far")


class StageProcesses:
    """The processes, which listen at free ports of this address of the machine: `addresses`, in the order of
    the ranks. If one ends, the others end: without it they would wait for ever."""

    def __init__(self, host: str, order: StageOrder, command: Sequence[str] = COMMAND) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.addresses: list[Address] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        memory = new_shared_file(order.ranks) if order.ranks > 1 else None
        identity = msgspec.msgpack.encode(order.identity)
        try:
            for _ in range(order.ranks):
                with socket.create_server((host, 0), family=family) as listener:
                    self.addresses.append((host, listener.getsockname()[1]))
                    self._start(command, listener.fileno(), open_memory_file(identity), memory, order.threads)
        finally:
            if memory is not None:
                os.close(memory)
        for process in self._processes:
            Thread(target=self._watch, args=(process,), daemon=True).start()

    def _start(
        self, command: Sequence[str], listener: int, identity: int, memory: int | None, threads: int
    ) -> None:
        given = [listener, identity, *(() if memory is None else (memory,))]
        try:
            self._processes.append(
                subprocess.Popen(  # noqa: S603  our own command
                    [*command, str(listener), str(identity), "-" if memory is None else str(memory)],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                    pass_fds=given,
                )
            )
        finally:
            os.close(identity)

    @property
    def pids(self) -> list[int]:
        """The process ids."""
        return [process.pid for process in self._processes]

    def _watch(self, process: "subprocess.Popen[bytes]") -> None:
        process.wait()
        for other in self._processes:
            other.kill()

    def wait(self) -> None:
        """Wait for the end of all processes."""
        for process in self._processes:
            process.wait()

    def end(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
