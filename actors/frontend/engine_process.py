"""Keeps one epoch of the engine core: starts its process, carries messages, and notices when it dies or
hangs.

This actor's life is the process's: it starts when the engine core has loaded, crashes when the engine core
ends, and its supervisor decides whether there is another. The engine core holds nothing that the frontend
does not have, so it is never asked to end: it is killed.
"""

import logging
import signal
from collections import deque
from collections.abc import Callable
from typing import Never, assert_never

import anyio
from anyio import CancelScope, current_time, fail_after, move_on_after
from anyio.abc import ByteReceiveStream

from personae import errors
from personae.actors.framing import frame
from personae.actors.frontend.frontend import Frontend
from personae.actors.kit.actor import Actor
from personae.actors.messages import (
    AdapterStats,
    EngineCoreStarted,
    KVEvents,
    Pinned,
    Refused,
    ReleaseRequest,
    StepDone,
)
from personae.actors.options import EngineOptions
from personae.actors.process import CoreProcess, Launch
from personae.actors.wire import (
    Facts,
    Loaded,
    LoadFailed,
    Loading,
    Port,
    Pulse,
    Start,
    ToFrontend,
    messages,
)
from personae.engine.scheduling.kv_events import AllBlocksCleared
from personae.engine.stats import SchedulerStats
from personae.errors import EngineCoreDied, EngineCoreHangs, LoadError
from personae.kernels.cgroup import free_memory

OUTPUT_LINES = 40  # lines of the engine core's output that are kept for the report
START_FACTOR = 10  # times as long as when it serves: a start imports, reads and compiles without a word
EXIT_SECONDS = 5.0  # to be waited for a process that closes its line, or was killed

log = logging.getLogger("personae.back")

Progress = Callable[[int, int], None]


class EngineProcess(Actor[Never]):
    """The frontend sends messages to the engine core through `port`. `connected` is called with the facts of
    the model when the engine core serves.

    `launch` starts the process. `hang_seconds` is how long one step may take, and how long a step may be in
    the executor's hands without coming back; while the engine core starts it may be silent for ten times as
    long. `silence_seconds` is how long it may say nothing at all when it serves: as long as a step, or less
    where another replica can go on in its place.
    """

    def __init__(
        self,
        launch: Launch,
        options: EngineOptions,
        epoch: int,
        port: Port,
        frontend: Frontend,
        connected: Callable[[Facts], None],
        on_progress: Progress | None,
        hang_seconds: float,
        silence_seconds: float | None = None,
    ) -> None:
        self._launch = launch
        self._options = options
        self._epoch = epoch
        self._port = port
        self._frontend = frontend
        self._connected = connected
        self._on_progress = on_progress
        self._hang_seconds = hang_seconds
        self._silence_seconds = hang_seconds if silence_seconds is None else silence_seconds
        self._words: deque[str] = deque(maxlen=OUTPUT_LINES)
        self._pulse = Pulse(False, 0)
        self._heard = self._moved = self._stepped = 0.0
        self._latest_stats = SchedulerStats()

    async def started(self) -> None:
        """Start the process and wait until it has loaded. Raises its LoadError, or EngineCoreDied."""
        self._process = await self._launch()
        self._line = self._process.line
        self._messages = messages(self._line, ToFrontend)
        try:
            await self._load()
        except BaseException:
            await self.stopped()
            raise

    async def _load(self) -> None:
        self.start_soon(self._listen, self._process.output)
        await self._line.send(frame(Start(self._options, self._epoch, self._process.box_file)))
        patience = START_FACTOR * self._hang_seconds
        facts: Facts | None = None
        while True:
            with move_on_after(patience) as waited:
                message = await anext(self._messages, None)
            if waited.cancelled_caught:
                raise EngineCoreHangs(f"The engine core has said nothing for {patience:g} s while it started")
            match message:
                case Loading(done=done, total=total):
                    if self._on_progress is not None:
                        self._on_progress(done, total)
                case LoadFailed(kind=kind, message=text):
                    failure: type[LoadError] = getattr(errors, kind)
                    raise failure(text)
                case Loaded():
                    facts = message.facts
                case EngineCoreStarted():
                    self._frontend.ingress.tell(message)
                    break
                case None:
                    raise await self._died_loading()
        self._port.is_open = True
        if self._options.record_kv_events:  # its cache is empty
            self._frontend.on_kv_events((AllBlocksCleared(),))
        assert facts is not None
        self._connected(facts)
        self._heard = self._moved = self._stepped = current_time()
        self.start_soon(self._read)
        self.start_soon(self._port.write, self._line)
        self.start_soon(self._watch)

    async def receive(self, message: Never) -> None:
        """Nobody tells it anything: what the engine core says reaches it through the socket."""
        assert_never(message)

    async def stopped(self) -> None:
        """End the process."""
        self._port.close()
        outside = self._process.returncode in (-signal.SIGKILL, -signal.SIGTERM)  # not by us: that comes now
        self._frontend.core_actors = ()
        with CancelScope(shield=True):
            self._frontend.note_engine_death(await self._process.last_step(), outside=outside)
            await self._messages.aclose()
            await self._line.aclose()
            await _kill(self._process)

    async def _read(self) -> None:
        # when this process was held up, more is read at once than a mailbox holds: send
        frontend = self._frontend
        async for message in self._messages:
            match message:
                case StepDone(stats=stats):
                    if (
                        stats.counters.steps != self._latest_stats.counters.steps
                        or not self._latest_stats.in_flight
                    ):
                        self._stepped = current_time()
                    self._latest_stats = stats
                    await frontend.streamer.send(message)
                case Refused() | AdapterStats():
                    await frontend.streamer.send(message)
                case Pinned(adapter=adapter) | ReleaseRequest(adapter=adapter):
                    await frontend.queue_of(adapter).send(message)
                case KVEvents(events=events):
                    frontend.on_kv_events(events)
                case Pulse():
                    if message.handled != self._pulse.handled or not message.busy:
                        self._moved = current_time()
                    self._pulse = message
                    frontend.core_actors = message.actors
            self._heard = current_time()
        raise await self._died()

    async def _watch(self) -> None:
        """Crash when the engine core is silent, its executor busy with one and the same message, or a step
        owed, for too long."""
        pause = min(self._hang_seconds, self._silence_seconds) / 4
        looked = current_time()
        while True:
            await anyio.sleep(pause)
            now = current_time()
            held_up = now - looked > 2 * pause  # this process was: what the engine core said is unread yet
            looked = now
            if now - self._heard > self._silence_seconds and not held_up:
                raise EngineCoreHangs(f"The engine core has said nothing for {now - self._heard:.1f} s")
            if now - self._moved > self._hang_seconds:
                raise EngineCoreHangs(f"The engine core has been in one step for {now - self._moved:.1f} s")
            if self._latest_stats.in_flight and now - self._stepped > self._hang_seconds:
                raise EngineCoreHangs(f"The engine core owes a step since {now - self._stepped:.1f} s")

    async def _listen(self, output: ByteReceiveStream) -> None:
        """Pass on what the engine core prints, and keep the end of it."""
        rest = ""
        async for data in output:
            *lines, rest = (rest + data.decode(errors="replace")).split("\n")
            for line in lines:
                self._words.append(line)
                log.info("%s", line)
        self._words.append(rest)

    async def _died_loading(self) -> EngineCoreDied:
        """In one sentence: nobody has to look for what it did last."""
        await self._ended()
        code = self._process.returncode
        if code == -signal.SIGKILL:
            free = free_memory()
            left = "" if free is None else f", {free / 2**30:.2f} GiB of memory are free now"
            return EngineCoreDied(
                f"The engine was killed while it loaded the model: probably out of memory{left}. Use a "
                "smaller model, --quantize int8 or int4, a smaller --kv-memory, or a larger machine."
            )
        word = next((word.strip() for word in reversed(self._words) if word.strip()), "it said nothing")
        return EngineCoreDied(
            f"The engine ended with exit code {code} while it loaded the model: {word[:500]}"
        )

    async def _ended(self) -> None:
        with move_on_after(EXIT_SECONDS):
            await self._process.wait()
            await anyio.sleep(0.05)  # its last words are in the pipe

    async def _died(self) -> EngineCoreDied:
        self._port.close()
        await self._ended()
        words = "\n".join(filter(None, self._words))
        where = "before its first step"
        if (last := await self._process.last_step()) is not None:
            where = f"in step {last.step} ({last.rows} rows, {last.tokens} tokens)"
            where += f" with {', '.join(last.on_device)} aboard"
        code = self._process.returncode
        killed = " (killed, if not by hand probably for want of memory)" if code == -signal.SIGKILL else ""
        return EngineCoreDied(
            f"The engine core ended with exit code {code}{killed} {where}; its last words:\n{words}"
        )


async def _kill(process: CoreProcess) -> None:
    process.kill()
    with fail_after(EXIT_SECONDS):
        await process.wait()
    await process.output.aclose()
