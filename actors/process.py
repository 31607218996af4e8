"""The engine core's process as the frontend sees it: a connection to it, its output, and its end."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

import anyio
from anyio import to_thread
from anyio.abc import ByteReceiveStream, ByteStream, SocketStream

from personae.actors.enginecore.step_recorder import LastStep
from personae.actors.spawn import Spawned, spawn
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
        self, spawned: Spawned, line: ByteStream, output: ByteReceiveStream, keep: Keep | None = None
    ) -> None:
        self._process = spawned.process
        self._recorder = spawned.recorder
        self.recorder_file = spawned.recorder_file
        self.keep = keep
        self.line = line
        self.output = output

    @classmethod
    async def launch(
        cls, command: Sequence[str], environment: Mapping[str, str] | None = None, keep: Keep | None = None
    ) -> "ChildProcess":
        """Start `command`, as `spawn` does."""
        spawned = spawn(command, environment)
        try:
            line = await SocketStream.from_socket(spawned.line)
            return cls(spawned, line, await SocketStream.from_socket(spawned.output), keep)
        except BaseException:  # cancelled: nobody else would end it
            spawned.end()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    async def wait(self) -> int:
        """Wait for its end."""
        if self._process.poll() is None:
            if sys.platform == "linux":
                file = os.pidfd_open(self.pid)
                try:
                    await anyio.wait_readable(file)
                finally:
                    os.close(file)
            else:
                await to_thread.run_sync(self._process.wait, abandon_on_cancel=True)
        return self._process.wait()

    def kill(self) -> None:
        """End it."""
        self._process.kill()

    async def last_step(self) -> LastStep | None:
        """Return the last step that it began."""
        return self._recorder.read()
