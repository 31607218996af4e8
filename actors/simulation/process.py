"""The simulated process of the engine core: its connection to the frontend, its output, and its death at any
moment."""

import random
from collections import deque
from collections.abc import Awaitable, Callable

import anyio
from anyio import CancelScope, Event
from anyio.abc import ByteReceiveStream, ByteStream

from personae.actors.enginecore.step_recorder import LastStep, StepRecorder
from personae.actors.framing import HEADER, decoder, frame, frame_length
from personae.actors.kit.supervisor import Supervisor
from personae.actors.simulation.loop import SimulationLoop
from personae.actors.simulation.ranks import SimulatedRanks
from personae.actors.simulation.trouble import Wrong
from personae.actors.spec import EngineSpec
from personae.actors.wire import Facts, Keep, Loaded, LoadFailed, Start

LATENCY = (20e-6, 200e-6)  # seconds that data is in transit
CRASHED = 1
KILLED = -9


class End(ByteStream):
    """One end of a connection. Data arrives after a while, in order, perhaps in pieces."""

    def __init__(self, loop: SimulationLoop, dice: random.Random) -> None:
        self.other: End
        self.held = False  # nothing arrives while this is set
        self._loop = loop
        self._dice = dice
        self._in_transit: deque[bytes] = deque()
        self._latest = 0.0
        self._data = bytearray()
        self._cut = self._closed = False
        self._arrived = Event()

    @classmethod
    def pair(cls, loop: SimulationLoop, dice: random.Random) -> "tuple[End, End]":
        """Make the two ends of one connection."""
        one, two = cls(loop, dice), cls(loop, dice)
        one.other, two.other = two, one
        return one, two

    async def send(self, item: bytes) -> None:
        """Send data."""
        await anyio.lowlevel.checkpoint()
        if self._closed:
            raise anyio.ClosedResourceError
        if self.other._closed or self.other._cut:
            raise anyio.BrokenResourceError
        self.other._expect(item)

    def _expect(self, data: bytes) -> None:
        self._in_transit.append(data)
        self._latest = max(self._latest, self._loop.time() + self._dice.uniform(*LATENCY))
        self._loop.call_at(self._latest, self._arrive)

    def _arrive(self) -> None:
        if self._in_transit and not self.held:
            self._data += self._in_transit.popleft()
            self._arrived.set()

    def release(self) -> None:
        """Let the held data arrive now."""
        self.held = False
        while self._in_transit:
            self._arrive()

    def cut(self) -> None:
        """The other side has died: a part of its last data can still be read, then comes the end."""
        left = b"".join(self._in_transit)
        self._in_transit.clear()
        self._data += left[: self._dice.randint(0, len(left))]
        self._cut = True
        self._arrived.set()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Return what has arrived. Waits for data."""
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
        """Fail: neither the frontend nor the engine core half-closes the connection."""
        raise Wrong("a connection was half closed")

    async def aclose(self) -> None:
        """Close this side."""
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


Serve = Callable[..., Awaitable[None]]  # such as `actors.enginecore.core.serve`


class SimulatedProcess:
    """Implements `actors.process.CoreProcess`. `run` is what the process does from its start to its end.
    `on_end` is called with the error that ended it, if there was one."""

    def __init__(
        self,
        loop: SimulationLoop,
        dice: random.Random,
        number: int,
        serve: Serve,
        engine_spec: EngineSpec,
        facts: Facts,
        start_seconds: float,
        load_fails: bool,
        ranks: SimulatedRanks,
        on_end: Callable[[StepRecorder, BaseException | None], None],
    ) -> None:
        line, self._own_end = End.pair(loop, dice)
        self.line: ByteStream = line
        self._frontend_end = line
        self.output: ByteReceiveStream = Silence()
        self.pid = number
        self.recorder = StepRecorder.private()
        self.recorder_file = -1
        self.keep: Keep | None = None
        self.returncode: int | None = None
        self.core: Supervisor | None = None  # its actors, once they run
        self.ranks = ranks
        self.drag = 1.0  # its device takes this many times as long for a step
        self._loop = loop
        self._serve = serve
        self._engine_spec = engine_spec
        self._facts = facts
        self._start_seconds = start_seconds
        self._load_fails = load_fails
        self._on_end = on_end
        self._scope = CancelScope()
        self._ended = Event()

    async def run(self) -> None:
        """Load, then serve until the end."""
        self._loop.threads.owner.set(self)
        with self._scope:
            try:
                start = await self._read_start()
                await anyio.sleep(self._start_seconds)
                if self._load_fails:
                    await self._own_end.send(frame(LoadFailed("ModelLoadError", "planted: no such weights")))
                    # What a process has sent stays readable when it exits by itself.
                    await anyio.sleep(LATENCY[1])
                    self.end(2)
                    return
                await self._own_end.send(frame(Loaded(self._facts)))
                await self._serve(
                    self._own_end, self._engine_spec, start.epoch, self.recorder, self.end, self._set_core
                )
            except Exception as error:
                self.end(CRASHED, error)
        self.end(0)

    def end(self, code: int, why: BaseException | None = None) -> None:
        """End now: no actor sends anything more, and no thread goes on."""
        if self.returncode is not None:
            return
        self.returncode = code
        self._on_end(self.recorder, why)
        self._frontend_end.cut()
        self._own_end.cut()
        self._scope.cancel()
        self._loop.threads.kill(self)
        self._ended.set()

    def hold(self, held: bool) -> None:
        """Stop the process as SIGSTOP does, or continue it."""
        for end in (self._frontend_end, self._own_end):
            if held:
                end.held = True
            else:
                end.release()

    def kill(self) -> None:
        """Kill it from outside."""
        self.end(KILLED)

    async def last_step(self) -> LastStep | None:
        """Return the last step that it began."""
        return self.recorder.read()

    async def wait(self) -> int:
        """Wait for its end."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def _set_core(self, core: Supervisor) -> None:
        self.core = core

    async def _read_start(self) -> Start:
        data = b""
        while len(data) < HEADER or len(data) < HEADER + frame_length(data, 0):
            data += await self._own_end.receive()  # the frontend sends nothing more until it gets an answer
        start: Start = decoder(Start).decode(data[HEADER:])
        return start
