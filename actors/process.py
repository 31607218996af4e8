"""The engine core's process as the frontend sees it: a line to it, what it prints, and its end."""

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Protocol

from anyio import open_process
from anyio.abc import ByteReceiveStream, ByteStream, Process, SocketStream

from personae.actors.enginecore.step_recorder import LastStep, StepRecorder


class CoreProcess(Protocol):
    """A process that has been started, or a simulation of one."""

    line: ByteStream
    output: ByteReceiveStream
    box_file: int  # by which it attaches to its step recorder

    @property
    def pid(self) -> int:
        """Its number."""

    @property
    def returncode(self) -> int | None:
        """How it ended; None while it lives."""

    async def wait(self) -> int:
        """Wait for its end; returns its exit code."""

    def kill(self) -> None:
        """End it, whatever it is doing."""

    async def last_step(self) -> LastStep | None:
        """The step that it began last, whether it lives or not; None if that is not known."""


class Launch(Protocol):
    """Starts a process."""

    async def __call__(self) -> CoreProcess:
        """Return as soon as it runs."""


class ChildProcess:
    """A process of the operating system; stdout and stderr are one output."""

    def __init__(self, process: Process, line: ByteStream, recorder: StepRecorder, box_file: int) -> None:
        assert process.stdout is not None
        self._process = process
        self._recorder = recorder
        self.box_file = box_file
        self.line = line
        self.output: ByteReceiveStream = process.stdout

    @classmethod
    async def launch(
        cls, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> "ChildProcess":
        """Start `command`, with the number of an open file added to it: its end of the line. `environment` is
        added to this process's."""
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
        return cls(process, await SocketStream.from_socket(ours), recorder, file)

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """How it ended; None while it lives."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for its end."""
        return await self._process.wait()

    def kill(self) -> None:
        """End it."""
        if self._process.returncode is None:
            self._process.kill()

    async def last_step(self) -> LastStep | None:
        """The step that it began last."""
        return self._recorder.read()
