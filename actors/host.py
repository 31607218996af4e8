"""Keeps one life of Back: starts its process, carries messages, and notices when it dies or hangs.

This actor's life is the process's: it starts when Back has loaded, crashes when Back ends, and its supervisor
decides whether there is another. Back holds nothing that Front does not have, so it is never asked to end:
it is killed.
"""

import logging
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Sequence

import anyio
from anyio import CancelScope, current_time, fail_after, move_on_after, open_process
from anyio.abc import ByteReceiveStream, Process, SocketStream

from personae import errors
from personae.actors.assembly import EngineOptions
from personae.actors.front import Front
from personae.actors.kit.actor import Actor
from personae.actors.messages import BackStarted, Holdings, Message, Pinned, Refused, StepDone, Yield
from personae.actors.wire import (
    Facts,
    Loaded,
    LoadFailed,
    Loading,
    Port,
    Pulse,
    Start,
    ToFront,
    frame,
    messages,
)
from personae.errors import LoadError, PersonaeError

LAST_WORDS = 40  # lines of Back's output that are kept for the report
FAREWELL_SECONDS = 5.0  # to be waited for a process that closes its line, or was killed

log = logging.getLogger("personae.back")

Progress = Callable[[int, int], None]


class BackDied(PersonaeError):
    """Back's process has ended; the message has its exit code and its last words."""


class BackHangs(PersonaeError):
    """Back's process lives and does not go on."""


class Host(Actor[Message]):
    """`port` is what the rest of Front tells Back through. `met` is told the facts of the model.

    `command` starts the process, the number of an open file is added to it. `hang_seconds` is how long Back
    may say nothing at all, and how long one step may take.
    """

    def __init__(
        self,
        command: Sequence[str],
        options: EngineOptions,
        life: int,
        port: Port,
        front: Front,
        met: Callable[[Facts], None],
        on_progress: Progress | None,
        hang_seconds: float,
    ) -> None:
        self._command = command
        self._options = options
        self._life = life
        self._port = port
        self._front = front
        self._met = met
        self._on_progress = on_progress
        self._hang_seconds = hang_seconds
        self._words: deque[str] = deque(maxlen=LAST_WORDS)
        self._pulse = Pulse(False, 0)
        self._heard = self._moved = 0.0

    async def started(self) -> None:
        """Start the process and wait until it has loaded. Raises its LoadError, or BackDied."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await open_process(
                [*self._command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
            )
        self._line = await SocketStream.from_socket(ours)
        self._messages = messages(self._line, ToFront)
        try:
            await self._load()
        except BaseException:
            await self.stopped()
            raise

    async def _load(self) -> None:
        assert self._process.stdout is not None
        self.start_soon(self._listen, self._process.stdout)
        await self._line.send(frame(Start(self._options, self._life)))
        async for message in self._messages:
            match message:
                case Loading(done=done, total=total):
                    if self._on_progress is not None:
                        self._on_progress(done, total)
                case LoadFailed(kind=kind, message=text):
                    failure: type[LoadError] = getattr(errors, kind)
                    raise failure(text)
                case Loaded(facts=facts):
                    self._met(facts)
                case BackStarted():
                    self._front.ingress.tell(message)
                    break
        else:
            raise await self._died()
        self._port.is_open = True
        self._heard = self._moved = current_time()
        self.start_soon(self._read)
        self.start_soon(self._port.write, self._line)
        self.start_soon(self._watch)

    async def stopped(self) -> None:
        """End the process."""
        self._port.close()
        self._front.back_actors = ()
        with CancelScope(shield=True):
            await self._messages.aclose()
            await self._line.aclose()
            await _kill(self._process)

    async def _read(self) -> None:
        front = self._front
        async for message in self._messages:
            match message:
                case StepDone() | Refused() | Holdings():
                    front.streamer.tell(message)
                case Pinned(adapter=adapter) | Yield(adapter=adapter):
                    front.queue_of(adapter).tell(message)
                case Pulse():
                    if message.handled != self._pulse.handled or not message.busy:
                        self._moved = current_time()
                    self._pulse = message
                    front.back_actors = message.actors
            self._heard = current_time()
        raise await self._died()

    async def _watch(self) -> None:
        """Crash when Back is silent, or its executor busy with one and the same message, for too long."""
        while True:
            await anyio.sleep(self._hang_seconds / 4)
            now = current_time()
            if now - self._heard > self._hang_seconds:
                raise BackHangs(f"Back has said nothing for {now - self._heard:.1f} s")
            if now - self._moved > self._hang_seconds:
                raise BackHangs(f"Back has been in one step for {now - self._moved:.1f} s")

    async def _listen(self, output: ByteReceiveStream) -> None:
        """Pass on what Back prints, and keep the end of it."""
        rest = ""
        async for data in output:
            *lines, rest = (rest + data.decode(errors="replace")).split("\n")
            for line in lines:
                self._words.append(line)
                log.info("%s", line)
        self._words.append(rest)

    async def _died(self) -> BackDied:
        self._port.close()
        with move_on_after(FAREWELL_SECONDS):
            await self._process.wait()
            await anyio.sleep(0.05)  # its last words are in the pipe
        words = "\n".join(filter(None, self._words))
        return BackDied(f"Back ended with exit code {self._process.returncode}; its last words:\n{words}")


async def _kill(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    with fail_after(FAREWELL_SECONDS):
        await process.wait()
    assert process.stdout is not None
    await process.stdout.aclose()
