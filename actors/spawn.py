"""Starts an engine core's process, with little more than the standard library.

So the command line can start one before it imports the server: both then load at the same time, and the
server is ready sooner.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from personae.actors.enginecore.step_recorder import StepRecorder

COMMAND = (sys.executable, "-m", "personae.actors.enginecore")


@dataclass(frozen=True, slots=True)
class Spawned:
    """A process that runs. `line` is our end of the connection to it, `output` of its stdout and stderr.
    `recorder_file` is the descriptor of its step recorder there."""

    process: subprocess.Popen[bytes]
    line: socket.socket
    output: socket.socket
    recorder: StepRecorder
    recorder_file: int

    def end(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()
        self.line.close()
        self.output.close()


_ahead: dict[tuple[str, ...], Spawned] = {}


def spawn(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Spawned:
    """Start `command`, unless it was started ahead. The file descriptor of its end of the connection is
    appended as the last argument. `environment` is added to this process's environment."""
    if not environment and (spawned := _ahead.pop(tuple(command), None)) is not None:
        if spawned.process.poll() is None:
            return spawned
        spawned.end()
    line, its_line = socket.socketpair()
    output, its_output = socket.socketpair()
    recorder, file = StepRecorder.create()
    with its_line, its_output, os.fdopen(file):
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [*command, str(its_line.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=its_output.fileno(),
            stderr=its_output.fileno(),
            env={**os.environ, **environment} if environment else None,
            pass_fds=(its_line.fileno(), file),
        )
    return Spawned(process, line, output, recorder, file)


@contextmanager
def ahead(command: Sequence[str] = COMMAND) -> Iterator[Spawned]:
    """Start `command` now, unless it was started ahead, for the next `spawn` of it. If there is none until
    the end, it is ended."""
    spawned = _ahead[tuple(command)] = spawn(command)
    try:
        yield spawned
    finally:
        end_ahead()


def have_spare(first: bytes, command: Sequence[str] = COMMAND) -> None:
    """Start `command` for the next `spawn` of it, and send it `first`, unless one that was started ahead
    runs."""
    there = _ahead.get(tuple(command))
    if there is None or there.process.poll() is not None:
        spawned = spawn(command)
        with suppress(OSError):  # it has ended; the next call starts another
            spawned.line.sendall(first)
        _ahead[tuple(command)] = spawned


def end_ahead() -> None:
    """End what was started ahead and is not needed."""
    while _ahead:
        _ahead.popitem()[1].end()
