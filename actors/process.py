"""The engine core's process as the frontend sees it: a connection to it, its output, and its end."""

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Protocol

from anyio import open_process
from anyio.abc import ByteReceiveStream, ByteStream, Process, SocketStream

from personae.actors.enginecore.step_recorder import LastStep, StepRecorder
from personae.actors.wire import Keep


class CoreProcess(Protocol):
    """A process that has been started, or a simulation of one. `line` is the connection to it."""

    line: ByteStream
    output: ByteReceiveStream
    recorder_file: int  # the file descriptor of its step recorder
    keep: Keep | None  # None: it ends with this process

    @property
    def pid(self) -> int:
        """Its process id."""

    @property
    def returncode(self) -> int | None:
        """Its exit code; None while it runs."""

    async def wait(self) -> int:
        """Wait for its end; returns its exit code."""

    def kill(self) -> None:
        """End it at once."""

    async def last_step(self) -> LastStep | None:
        """Return the last step that it began, whether or not it still runs; None if that is unknown."""


class Launch(Protocol):
    """Starts a process."""

    async def __call__(self) -> CoreProcess:
        """Return as soon as the process runs."""


class ChildProcess:
    """A process of the operating system. Its stdout and stderr are one output."""

    def __init__(
        self,
        process: Process,
        line: ByteStream,
        recorder: StepRecorder,
        recorder_file: int,
        keep: Keep | None = None,
    ) -> None:
        assert process.stdout is not None
        self._process = process
        self._recorder = recorder
        self.recorder_file = recorder_file
        self.keep = keep
        self.line = line
        self.output: ByteReceiveStream = process.stdout

    @classmethod
    async def launch(
        cls, command: Sequence[str], environment: Mapping[str, str] | None = None, keep: Keep | None = None
    ) -> "ChildProcess":
        """Start `command`. The file descriptor of its end of the connection is appended as the last argument.
        `environment` is added to this process's environment."""
        ours, theirs = socket.socketpair()
        recorder, file = StepRecorder.create()
        with theirs, os.fdopen(file):
            process = await open_process(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment} if environment else None,
                pass_fds=(theirs.fileno(), file),
            )
        return cls(process, await SocketStream.from_socket(ours), recorder, file, keep)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for its end."""
        return await self._process.wait()

    def kill(self) -> None:
        """End it."""
        if self._process.returncode is None:
            self._process.kill()

    async def last_step(self) -> LastStep | None:
        """Return the last step that it began."""
        return self._recorder.read()
