"""The device: streams of jobs that run as late as they may, memory that is poison until it is written.

A job is put on its stream when the host launches it and runs when something waits for it: an event, a copy
that blocks, a value that is read. So whoever reads a pinned buffer before its copy has come, writes to one
that is still to be read, or forgets that two streams do not wait for each other, computes with the wrong
bytes. `Late` says which streams dawdle: one schedule finds what another hides.

Memory comes as 0xFF (NaN, or -1) and becomes that again when its last tensor goes, in the order of the stream
it was taken on, as torch's allocator gives it to the next who asks. Each replay of a graph poisons what the
captures of its pool have let go of.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch

Job = Callable[[], None]
BLOCK = 512  # bytes: what the allocator rounds up to, and every block's alignment
TESTS = Path(__file__).resolve().parent
TORCH = Path(torch.__file__).resolve().parent


class Mistake(AssertionError):
    """What would fail, or be wrong, or be slow, on a GPU."""


class Late(Enum):
    """Which streams do nothing until something waits for them."""

    ALL = "all streams"
    MAIN = "the steps' stream"
    SIDE = "the streams beside it"


@dataclass(frozen=True)
class Wait:
    """The host waited for the device, or may have. where: the lines of ours that led there, the last
    first."""

    kind: str
    where: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind} at {' < '.join(self.where)}"


class Stream:
    """Jobs in their order; `done` of them have run."""

    def __init__(self, machine: "Machine", name: str) -> None:
        self.machine, self.name = machine, name
        self.jobs: list[tuple[str, Job]] = []
        self.done = 0
        self.running = False

    def run(self, until: int) -> None:
        """Run the first `until` jobs, those of other streams that they wait for before them."""
        while self.done < until:
            if self.running:
                raise Mistake(f"stream {self.name} waits for itself")
            where, job = self.jobs[self.done]
            self.running = True
            try:
                job()
            except Exception as error:
                error.add_note(f"launched at {where}")
                raise
            finally:
                self.running = False
            self.jobs[self.done] = (where, _ran)
            self.done += 1


def _ran() -> None:
    raise AssertionError("a job ran twice")


class Memory:
    """A block of the device. `live` while a tensor holds it; `pool` if a graph's capture took it."""

    def __init__(self, machine: "Machine", size: int, stream: Stream, graph: "Recording | None") -> None:
        self.machine, self.stream, self.graph = machine, stream, graph
        self.size = -(-size // BLOCK) * BLOCK
        self.bytes = _aligned(self.size, machine.blank)
        self.also: list[tuple[Stream, int]] = []  # other streams that used it, as record_stream was told
        machine.taken(self)

    def __del__(self) -> None:
        self.machine.let_go(self)


def _aligned(size: int, blank: bool = False) -> torch.Tensor:
    # Zeros that nobody touches take no memory, whatever their number.
    memory = np.zeros(size + BLOCK, np.uint8) if blank else np.full(size + BLOCK, 0xFF, np.uint8)
    first = -memory.ctypes.data % BLOCK
    return torch.from_numpy(memory[first : first + size])


@dataclass
class Pool:
    """What the captures of some graphs have allocated and let go of."""

    dead: list[torch.Tensor] = field(default_factory=list)


@dataclass
class Recording:
    """A graph that is captured: the jobs of a stream, which each replay repeats."""

    pool: Pool
    stream: Stream
    thread: int
    jobs: list[tuple[str, Job]] = field(default_factory=list)
    over: bool = False


class Machine:
    """One device. `total`: its memory in bytes. `waits`: whenever the host waited; `launches`: kernels by
    name; `compiled`: those that had to be compiled for a launch, by name and Triton's key. `blank`: nothing
    is computed, so shapes may be as large as in life."""

    def __init__(self, total: int = 1 << 30, late: Late = Late.ALL, blank: bool = False) -> None:
        self.total, self.late, self.blank = total, late, blank
        self.live = self.peak = 0
        self.lock = threading.RLock()
        self.main = Stream(self, "main")
        self.streams = [self.main]
        self.waits: list[Wait] = []
        self.launches: Counter[str] = Counter()
        self.compiled: set[tuple[str, str]] = set()
        self.sources: dict[tuple[str, str], tuple[Any, ...]] = {}  # what Triton would compile for them
        self.bound: dict[str, Any] = {}  # the arguments of each kernel's last launch
        self.pinned: list[tuple[int, int]] = []  # addresses, from and to
        self.captures = 0
        self.over = False
        self.recording: Recording | None = None
        self._kept: list[object] = []
        self._here = threading.local()

    @property
    def current(self) -> Stream:
        """The stream of the calling thread."""
        stream: Stream = getattr(self._here, "stream", self.main)
        return stream

    @current.setter
    def current(self, stream: Stream) -> None:
        self._here.stream = stream

    @property
    def capturing(self) -> Recording | None:
        """The graph that the calling thread captures."""
        own = self.recording is not None and self.recording.thread == threading.get_ident()
        return self.recording if own else None

    def side(self) -> Stream:
        """A new stream."""
        stream = Stream(self, f"side {len(self.streams)}")
        self.streams.append(stream)
        return stream

    def push(self, job: Job, stream: Stream | None = None) -> None:
        """Launch a job on a stream, else the current one."""
        with self.lock:
            stream = stream or self.current
            recording = self.capturing
            if recording is not None:
                if stream is not recording.stream:
                    raise Mistake(f"work on stream {stream.name} while {recording.stream.name} is captured")
                recording.jobs.append((here()[0], job))
                return
            if self.blank:
                return
            stream.jobs.append((here()[0], job))
            if not self.lags(stream):
                stream.run(len(stream.jobs))

    def lags(self, stream: Stream) -> bool:
        """Whether the stream runs only when something waits for it."""
        return self.late is Late.ALL or (stream is self.main) == (self.late is Late.MAIN)

    def wait_for(self, stream: Stream, other: Stream, place: int) -> None:
        """Have a stream wait for another's first `place` jobs."""
        with self.lock:
            if self.capturing is not None and other.done < place:
                raise Mistake("a captured graph waits for work outside of it")
            self.push(lambda: other.run(place), stream)

    def wait(self, kind: str, *, flush: bool = True) -> None:
        """The host waits for its current stream, or may."""
        if self.capturing is not None:
            raise Mistake(f"{kind} while a graph is captured, at {' < '.join(here())}")
        self.waits.append(Wait(kind, here()))
        if flush:
            self.catch_up(self.current)

    def catch_up(self, stream: Stream, place: int | None = None) -> None:
        """Run a stream."""
        with self.lock:
            stream.run(len(stream.jobs) if place is None else place)

    def catch_up_all(self) -> None:
        """Run all there is."""
        for stream in self.streams:
            self.catch_up(stream)

    # Memory

    def taken(self, memory: Memory) -> None:
        """A block was allocated. Raises torch's error when there is not that much."""
        with self.lock:
            if self.live + memory.size > self.total:
                memory.size = 0
                raise torch.OutOfMemoryError(f"{self.live} of {self.total} bytes are taken")
            self.live += memory.size
            self.peak = max(self.peak, self.live)

    def let_go(self, memory: Memory) -> None:
        """A block's last tensor has gone: whoever is next on its stream may write there."""
        if not memory.size or self.over:
            return
        with self.lock:
            contents = memory.bytes
            recording = memory.graph
            if recording is not None:
                recording.pool.dead.append(contents)
                if not recording.over:
                    recording.jobs.append(("the allocator", lambda: _poison(contents)))
                return
            self.live -= memory.size
            if self.blank:
                return
            stream = memory.stream
            for other, place in memory.also:
                stream.jobs.append(("record_stream", lambda o=other, p=place: o.run(p)))
            stream.jobs.append(("the allocator", lambda: _poison(contents)))

    def pin(self, size: int) -> torch.Tensor:
        """Bytes of the host that the device reads by itself. They stay, as nobody knows who still reads
        them."""
        memory = _aligned(max(size, 1))
        self.pinned.append((memory.data_ptr(), memory.data_ptr() + memory.numel()))
        self._kept.append(memory)
        return memory[:size]

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the host lies in such memory."""
        at = tensor.data_ptr()
        return any(first <= at < last for first, last in self.pinned)

    # Graphs

    @contextmanager
    def capture(self, pool: Pool, stream: Stream) -> Iterator[Recording]:
        """Within the block what this thread launches on the stream is recorded."""
        self.captures += 1
        recording = self.recording = Recording(pool, stream, threading.get_ident())
        try:
            yield recording
        finally:
            recording.over, self.recording = True, None

    def replay(self, recording: Recording) -> None:
        """Launch a graph: all its jobs, again."""
        if self.capturing is not None:
            raise Mistake("a graph is replayed while another is captured")
        dead = recording.pool.dead

        def run() -> None:
            for contents in dead:
                _poison(contents)
            for where, job in recording.jobs:
                try:
                    job()
                except Exception as error:
                    error.add_note(f"captured at {where}")
                    raise

        self.push(run)


def _poison(contents: torch.Tensor) -> None:
    contents.fill_(0xFF)


def here() -> tuple[str, ...]:
    """Where the host is: file and line of our own code, the innermost first."""
    found = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < 3:
        name = frame.f_code.co_filename
        if not name.startswith((str(TESTS), str(TORCH), "<")) and "/contextlib" not in name:
            found.append(f"{'/'.join(name.split('/')[-2:])}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]  # ends with None
    return tuple(found) or ("nowhere",)
