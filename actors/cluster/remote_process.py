"""An engine core's process on another machine as the frontend sees it, and how to start it."""

import signal
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio
from anyio import CancelScope, move_on_after
from anyio.abc import ByteReceiveStream, ByteStream
from msgspec.structs import replace

from personae.actors.cluster.adapter_files import AdapterFiles
from personae.actors.cluster.contact import (
    CONTROL_FRAME,
    AskLastStep,
    Contact,
    Ended,
    FromAgent,
    Output,
    Spawned,
    StepNote,
)
from personae.actors.cluster.frames import FrameReader
from personae.actors.cluster.listener import Expected, Listener
from personae.actors.enginecore.step_recorder import LastStep
from personae.actors.framing import frame
from personae.actors.wire import Keep
from personae.errors import EngineCoreDied

ANSWER_SECONDS = 1.0  # how long a node may take to report its engine's last step

StartEngine = Callable[[Contact], Awaitable[None]]
"""Has a node start an engine that calls this contact. Raises LoadError if the node refuses."""

PlaceEngine = Callable[[], Awaitable[StartEngine]]
"""Waits until there is a node for an engine, and returns how to start it there."""


class RemoteProcess:
    """A process that an agent runs (`agent.py`). If its machine can't be reached, it counts as killed."""

    def __init__(self, control: ByteStream) -> None:
        self._control = control
        self._frames: FrameReader[FromAgent] = FrameReader(control, FromAgent, CONTROL_FRAME)
        self._reading = anyio.Lock()
        self._printed: deque[bytes] = deque()
        self._last: LastStep | None = None
        self._noted = self._killed = False
        self.line: ByteStream
        self.files: ByteStream  # on which it requests adapters
        self.output: ByteReceiveStream = _Output(self)
        self.pid = self.recorder_file = -1
        self.keep: Keep | None = None  # its node ends it when the connection closes
        self.returncode: int | None = None

    async def spawned(self) -> None:
        """Wait until the process runs."""
        await self._read_until(lambda: self.pid >= 0)

    async def connected(self, line: Expected, files: Expected) -> None:
        """Wait until the process has connected. Raises EngineCoreDied if it ends before."""

        async def watch() -> None:
            await self.wait()
            waiting.cancel_scope.cancel()

        async with anyio.create_task_group() as waiting:
            waiting.start_soon(watch)
            self.line = await line.stream()
            self.files = await files.stream()
            waiting.cancel_scope.cancel()
        if self.returncode is not None:
            output = b"".join(self._printed).decode(errors="replace").strip()
            raise EngineCoreDied(
                f"The engine core ended with exit code {self.returncode} before it connected to the "
                f"frontend; its last output:\n{output[-2000:]}"
            )

    async def wait(self) -> int:
        """Wait for its end."""
        await self._read_until(lambda: self.returncode is not None)
        if self._killed:
            await self.aclose()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """End the process: its node notices that the connection closes. Nothing waits for a machine that may
        be gone."""
        if self.returncode is None:
            self._killed = True
            self.returncode = -signal.SIGKILL

    async def last_step(self) -> LastStep | None:
        """Return the last step that it began; None if there was none, or if its machine does not answer."""
        if self.returncode is None:
            with move_on_after(ANSWER_SECONDS, shield=True):
                self._noted = False
                await self._control.send(frame(AskLastStep()))
                await self._read_until(lambda: self._noted or self.returncode is not None)
        return self._last

    async def printed(self) -> bytes:
        """Return its next output; empty when there is no more."""
        await self._read_until(lambda: bool(self._printed) or self.returncode is not None)
        return self._printed.popleft() if self._printed else b""

    async def aclose(self) -> None:
        """Close the connection. Its node then ends the process, if it runs."""
        with CancelScope(shield=True):
            await anyio.aclose_forcefully(self._control)

    async def _read_until(self, done: Callable[[], bool]) -> None:
        while not done():
            async with self._reading:
                if not done():
                    self._handle(await self._frames.next())

    def _handle(self, message: FromAgent | None) -> None:
        match message:
            case Spawned(pid=pid, recorder_file=recorder_file):
                self.pid, self.recorder_file = pid, recorder_file
            case Output(data=data):
                self._printed.append(data)
            case StepNote(last=last):
                self._last, self._noted = last, True
            case Ended(code=code, last=last):
                self.returncode, self._last = code, last
            case None:  # its node is gone, and the process with it
                self.returncode = -signal.SIGKILL


class _Output(ByteReceiveStream):
    def __init__(self, process: RemoteProcess) -> None:
        self._process = process

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Return the process's next output."""
        if data := await self._process.printed():
            return data
        raise anyio.EndOfStream

    async def aclose(self) -> None:
        """Close the connection."""
        await self._process.aclose()


@dataclass(frozen=True, slots=True)
class RemoteLaunch:
    """Starts an engine core's process on another machine, which `place` finds. `adapters` serves the files
    that it requests; `terms` are the other settings that it receives."""

    listener: Listener
    place: PlaceEngine
    adapters: AdapterFiles
    terms: Contact

    async def __call__(self) -> RemoteProcess:
        """Return when the process has connected. Raises LoadError if the node refuses, EngineCoreDied if the
        process ends before, TimeoutError if nothing connects."""
        begin = await self.place()  # this may take long; the tickets' time begins only then
        listener = self.listener
        async with listener.expect() as line, listener.expect() as control, listener.expect() as files:
            await begin(
                replace(
                    self.terms,
                    host=listener.host,
                    port=listener.port,
                    line=line.ticket,
                    control=control.ticket,
                    files=files.ticket,
                    certificate=listener.certificate,
                    adapters=self.adapters.keys,
                )
            )
            process = RemoteProcess(await control.stream())
            try:
                await process.spawned()
                await process.connected(line, files)
            except BaseException:
                await process.aclose()
                raise
            listener.tasks.start_soon(self.adapters.serve, process.files)
        return process
