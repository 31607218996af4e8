"""Runs one epoch of the engine core: starts its process, carries messages, and notices when it dies or hangs.

This actor lives as long as the process. It has started when the engine core has loaded, and it crashes when
the engine core ends. Its supervisor decides whether to start another. The engine core holds nothing that the
frontend does not have, so it is killed, never asked to end.
"""

import logging
import re
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
from personae.actors.frontend.hang_detector import HangDetector
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

OUTPUT_LINES = 40  # last lines of the engine core's output that an error report shows
START_FACTOR = 10  # x `hang_seconds` for a start, which imports, reads and compiles in silence
QUIET_SECONDS = 0.002  # without more output: that of a process that has ended is read
EXIT_SECONDS = 5.0  # how long to wait for a process that closed its connection or was killed

log = logging.getLogger("personae.engine")
_LOGGED = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w.]+) (.*)")  # by the engine core

Progress = Callable[[str, int, int], None]
"""Called with the phase of a start, and the bytes that are done and all bytes: 0 where it counts none."""


class EngineProcess(Actor[Never]):
    """The frontend sends messages to the engine core through `port`. `connected` is called with the facts of
    the model when the engine core serves.

    `launch` starts the process. `hang_seconds` is how long one step may take, and how long the executor may
    keep a step without returning it. While the engine core starts, it may be silent for ten times as long.
    `silence_seconds` is how long a serving engine core may send no message at all: as long as a step, or less
    if another replica can take over.
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
        self._output_tail: deque[str] = deque(maxlen=OUTPUT_LINES)
        self._output_read = 0  # bytes
        self._pulse = Pulse(False, 0)
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
        self.start_soon(self._read_output, self._process.output)
        process = self._process
        await self._line.send(frame(Start(self._options, self._epoch, process.recorder_file, process.keep)))
        timeout = START_FACTOR * self._hang_seconds
        facts: Facts | None = None
        while True:
            with move_on_after(timeout) as scope:
                message = await anext(self._messages, None)
            if scope.cancelled_caught:
                raise EngineCoreHangs(f"The engine core sent no message for {timeout:g} s while it started")
            match message:
                case Loading(phase=phase, done=done, total=total):
                    if self._on_progress is not None:
                        self._on_progress(phase, done, total)
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
        self._hang = HangDetector(
            current_time(), hang_seconds=self._hang_seconds, silence_seconds=self._silence_seconds
        )
        self.start_soon(self._read)
        self.start_soon(self._port.write, self._line)
        self.start_soon(self._watch)

    async def receive(self, message: Never) -> None:
        """Nothing sends messages to this actor: the engine core's arrive through the socket."""
        assert_never(message)

    async def stopped(self) -> None:
        """End the process."""
        self._port.close()
        outside = self._process.returncode in (-signal.SIGKILL, -signal.SIGTERM)  # before our own kill
        self._frontend.core_actors = ()
        with CancelScope(shield=True):
            self._frontend.note_engine_death(await self._process.last_step(), outside=outside)
            await self._messages.aclose()
            await self._line.aclose()
            await _kill(self._process)

    async def _read(self) -> None:
        # after this process was blocked, more arrives at once than a mailbox holds: send, which waits
        frontend = self._frontend
        async for message in self._messages:
            match message:
                case StepDone(stats=stats):
                    if (
                        stats.counters.steps != self._latest_stats.counters.steps
                        or not self._latest_stats.in_flight
                    ):
                        self._hang.note_step(current_time())
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
                        self._hang.note_progress(current_time())
                    self._pulse = message
                    frontend.core_actors = message.actors
            self._hang.note_message(current_time())
        raise await self._died()

    async def _watch(self) -> None:
        """Crash when, for too long, the engine core sends nothing, its executor handles the same message, or
        a step does not come back."""
        while True:
            await anyio.sleep(self._hang.pause)
            hang = self._hang.check(current_time(), in_flight=bool(self._latest_stats.in_flight))
            if hang is not None:
                raise EngineCoreHangs(hang)

    async def _read_output(self, output: ByteReceiveStream) -> None:
        """Log what the engine core prints, and keep the last lines."""
        rest = ""
        async for data in output:
            self._output_read += len(data)
            *lines, rest = (rest + data.decode(errors="replace")).split("\n")
            for line in lines:
                self._output_tail.append(line)
                _log_again(line)
        self._output_tail.append(rest)

    async def _died_loading(self) -> EngineCoreDied:
        """Describe the failed start in one sentence: operators need its reason, not its last step."""
        await self._ended()
        code = self._process.returncode
        if code == -signal.SIGKILL:
            free = free_memory()
            left = "" if free is None else f", {free / 2**30:.2f} GiB of memory are free now"
            return EngineCoreDied(
                f"The engine was killed while it loaded the model: probably out of memory{left}. Use a "
                "smaller model, --quantize int8 or int4, a smaller --kv-memory, or a larger machine."
            )
        lines = (line.strip() for line in reversed(self._output_tail))
        reason = next(filter(None, lines), "it printed nothing")
        return EngineCoreDied(
            f"The engine ended with exit code {code} while it loaded the model: {reason[:500]}"
        )

    async def _ended(self) -> None:
        with move_on_after(EXIT_SECONDS):
            await self._process.wait()
            read = -1
            while read != self._output_read:  # its last output is still in the pipe
                read = self._output_read
                await anyio.sleep(QUIET_SECONDS)

    async def _died(self) -> EngineCoreDied:
        self._port.close()
        await self._ended()
        output = "\n".join(filter(None, self._output_tail))
        where = "before its first step"
        if (last := await self._process.last_step()) is not None:
            where = f"in step {last.step} ({last.rows} rows, {last.tokens} tokens)"
            where += f" with {', '.join(last.on_device)} on the device"
        code = self._process.returncode
        killed = (
            " (killed: if nobody did it by hand, probably out of memory)" if code == -signal.SIGKILL else ""
        )
        return EngineCoreDied(
            f"The engine core ended with exit code {code}{killed} {where}; its last output:\n{output}"
        )


async def _kill(process: CoreProcess) -> None:
    process.kill()
    with fail_after(EXIT_SECONDS):
        await process.wait()
    await process.output.aclose()


def _log_again(line: str) -> None:
    """Log a line of the engine core: what it logged by the same logger, what it printed by this one."""
    if logged := _LOGGED.fullmatch(line):
        level, name, message = logged.groups()
        logging.getLogger(name).log(logging.getLevelNamesMapping()[level], "%s", message)
    else:
        log.info("%s", line)
