"""The engine core's process, simulated: its line to the frontend, its output, and its death at any moment."""

import random
from collections import deque
from collections.abc import Awaitable, Callable

import anyio
from anyio import CancelScope, Event
from anyio.abc import ByteReceiveStream, ByteStream

from personae.actors.enginecore.step_recorder import LastStep, StepRecorder
from personae.actors.framing import decoder, frame
from personae.actors.kit.supervisor import Supervisor
from personae.actors.simulation.loop import SimulationLoop
from personae.actors.simulation.trouble import Wrong
from personae.actors.spec import EngineSpec
from personae.actors.wire import Facts, Loaded, LoadFailed, Start

_HEADER = 4
LATENCY = (20e-6, 200e-6)  # seconds that a piece of data is on its way
CRASHED = 1
KILLED = -9


class End(ByteStream):
    """One end of a line. What is sent arrives after a while, in order, perhaps in pieces."""

    def __init__(self, loop: SimulationLoop, dice: random.Random) -> None:
        self.other: End
        self.held = False  # nothing arrives for as long as this is set
        self._loop = loop
        self._dice = dice
        self._on_its_way: deque[bytes] = deque()
        self._latest = 0.0
        self._data = bytearray()
        self._cut = self._closed = False
        self._arrived = Event()

    @classmethod
    def pair(cls, loop: SimulationLoop, dice: random.Random) -> "tuple[End, End]":
        """Two ends of one line."""
        one, two = cls(loop, dice), cls(loop, dice)
        one.other, two.other = two, one
        return one, two

    async def send(self, item: bytes) -> None:
        """Put data on its way."""
        await anyio.lowlevel.checkpoint()
        if self._closed:
            raise anyio.ClosedResourceError
        if self.other._closed or self.other._cut:
            raise anyio.BrokenResourceError
        self.other._expect(item)

    def _expect(self, data: bytes) -> None:
        self._on_its_way.append(data)
        self._latest = max(self._latest, self._loop.time() + self._dice.uniform(*LATENCY))
        self._loop.call_at(self._latest, self._arrive)

    def _arrive(self) -> None:
        if self._on_its_way and not self.held:
            self._data += self._on_its_way.popleft()
            self._arrived.set()

    def release(self) -> None:
        """What was held arrives now."""
        self.held = False
        while self._on_its_way:
            self._arrive()

    def cut(self) -> None:
        """The other side has died: a part of what it sent last may still be read, then comes the end."""
        left = b"".join(self._on_its_way)
        self._on_its_way.clear()
        self._data += left[: self._dice.randint(0, len(left))]
        self._cut = True
        self._arrived.set()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """What has arrived; waits for something."""
        while not self._data:
            if self._closed:
                raise anyio.ClosedResourceError
            if self._cut or self.other._closed:
                raise anyio.EndOfStream
            self._arrived = Event()
            await self._arrived.wait()
        data = bytes(self._data[:max_bytes])
        del self._data[:max_bytes]
        return data

    async def send_eof(self) -> None:
        """Neither the frontend nor the engine core does that: a half-closed line is the end of both."""
        raise Wrong("a line was half closed")

    async def aclose(self) -> None:
        """This side is gone."""
        self._closed = True
        self._arrived.set()
        self.other._arrived.set()


class Silence(ByteReceiveStream):
    """The output of a process that prints nothing."""

    def __init__(self) -> None:
        self._end = Event()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Wait for the end."""
        await self._end.wait()
        raise anyio.EndOfStream

    async def aclose(self) -> None:
        """End it."""
        self._end.set()


Play = Callable[..., Awaitable[None]]  # as `actors.enginecore.core.serve`


class SimulatedProcess:
    """Implements `actors.process.BackProcess`. `run` is what the process does, from its start to its end;
    `on_end` is told the error that ended it, if it was one."""

    def __init__(
        self,
        loop: SimulationLoop,
        dice: random.Random,
        number: int,
        play: Play,
        engine_spec: EngineSpec,
        facts: Facts,
        start_seconds: float,
        load_fails: bool,
        on_end: Callable[[StepRecorder, BaseException | None], None],
    ) -> None:
        line, self._mine = End.pair(loop, dice)
        self.line: ByteStream = line
        self._theirs = line
        self.output: ByteReceiveStream = Silence()
        self.pid = number
        self.recorder = StepRecorder.private()
        self.recorder_file = -1
        self.returncode: int | None = None
        self.core: Supervisor | None = None  # its actors, once they are there
        self.drag = 1.0  # times as long as it should does its device take for a step
        self._loop = loop
        self._play = play
        self._engine_spec = engine_spec
        self._facts = facts
        self._start_seconds = start_seconds
        self._load_fails = load_fails
        self._on_end = on_end
        self._scope = CancelScope()
        self._ended = Event()

    async def run(self) -> None:
        """Load, then play until the end."""
        self._loop.threads.owner.set(self)
        with self._scope:
            try:
                start = await self._first()
                await anyio.sleep(self._start_seconds)
                if self._load_fails:
                    await self._mine.send(frame(LoadFailed("ModelLoadError", "planted: no such weights")))
                    # What a process has sent stays readable when it exits by itself.
                    await anyio.sleep(LATENCY[1])
                    self.end(2)
                    return
                await self._mine.send(frame(Loaded(self._facts)))
                await self._play(
                    self._mine, self._engine_spec, start.epoch, self.recorder, self.end, self._meet
                )
            except Exception as error:
                self.end(CRASHED, error)
        self.end(0)

    def end(self, code: int, why: BaseException | None = None) -> None:
        """Die now: no actor gets another word out, no thread goes on."""
        if self.returncode is not None:
            return
        self.returncode = code
        self._on_end(self.recorder, why)
        self._theirs.cut()
        self._mine.cut()
        self._scope.cancel()
        self._loop.threads.kill(self)
        self._ended.set()

    def hold(self, held: bool) -> None:
        """Stop the process, as SIGSTOP does, or let it go on."""
        for end in (self._theirs, self._mine):
            if held:
                end.held = True
            else:
                end.release()

    def kill(self) -> None:
        """End it from outside."""
        self.end(KILLED)

    async def last_step(self) -> LastStep | None:
        """The step that it began last."""
        return self.recorder.read()

    async def wait(self) -> int:
        """Wait for its end."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def _meet(self, core: Supervisor) -> None:
        self.core = core

    async def _first(self) -> Start:
        data = b""
        while len(data) < _HEADER or len(data) < _HEADER + int.from_bytes(data[:_HEADER], "little"):
            data += await self._mine.receive()  # The frontend says nothing more until it is answered
        start: Start = decoder(Start).decode(data[_HEADER:])
        return start
