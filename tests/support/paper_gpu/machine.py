"""The simulated device: streams of jobs that run as late as possible, and memory that is poison until it is
written.

A job is put on its stream when the host launches it. It runs when something waits for it: an event, a copy
that blocks, a value that is read. So code computes with wrong bytes if it reads a pinned buffer before its
copy is done, writes to a buffer that is still to be read, or forgets that two streams do not wait for each
other. `Late` says which streams are late: one schedule finds errors that another hides.

Memory begins as 0xFF (NaN, or -1) and becomes that again when its last tensor is freed, in the order of the
stream that allocated it, as torch's allocator may hand it to the next allocation. Each replay of a graph
poisons the memory that the captures of its pool have freed.

A graph has the streams that were forked within its capture. They are as late as `Late` says of side streams:
they run when they are waited for, or as soon as their dependencies are done.
"""

import sys
import threading
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

Job = Callable[[], None]
ALLOCATOR = "the allocator"  # its jobs stand for the next user of the memory
BLOCK = 512  # bytes; the allocator rounds up to this, and aligns every block to it
TESTS = Path(__file__).resolve().parent
TORCH = Path(torch.__file__).parent  # as frames name it, through links


class Mistake(AssertionError):
    """Something that would fail, be wrong or be slow on a GPU."""


class Late(Enum):
    """Which streams do nothing until something waits for them."""

    ALL = "all streams"
    MAIN = "the steps' stream"
    SIDE = "the streams beside it"


@dataclass(frozen=True)
class Wait:
    """The host waited for the device, or may have. where: the lines of our code that led there, the last
    first."""

    kind: str
    where: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind} at {' < '.join(self.where)}"


class Stream:
    """Jobs in order. `done` of them have run."""

    def __init__(self, machine: "Machine", name: str) -> None:
        self.machine, self.name = machine, name
        self.jobs: list[tuple[str, Job]] = []
        self.done = 0
        self.running = False
        self.kernel: str | None = None  # that was launched last, if nothing else came behind it

    def run(self, until: int) -> None:
        """Run the first `until` jobs, after the jobs of other streams that they wait for."""
        while self.done < until:
            if self.running:
                raise Mistake(f"stream {self.name} waits for itself")
            where, job = self.jobs[self.done]
            self.running = True
            try:
                with torch._C._DisableTorchDispatch():  # jobs are of the host's tensors only
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
    """What the captures of some graphs have allocated and let go of; `free`: as bytes, for those to come.
    Captures are numbered; `dead` has for each block the capture that took it, and the last one begun when it
    was let go."""

    dead: list[tuple[torch.Tensor, int, int]] = field(default_factory=list)
    free: int = 0
    captures: int = 0


@dataclass(frozen=True)
class StreamPosition:
    """After the first `at` jobs of a stream; of a graph's stream, if they are captured."""

    stream: Stream
    at: int
    recording: "Recording | None"


@dataclass
class Recording:
    """A graph that is being captured: its streams' jobs, and the positions that they wait for. Each replay
    repeats them. The capture began on `origin`."""

    machine: "Machine"
    pool: Pool
    origin: Stream
    thread: int
    lines: dict[Stream, list[tuple[str, Job | StreamPosition]]] = field(default_factory=dict)
    over: bool = False
    number: int = 0

    def __post_init__(self) -> None:
        self.lines[self.origin] = []
        self.pool.captures += 1
        self.number = self.pool.captures

    def unjoined(self) -> list[str]:
        """The streams with work that the origin does not wait for."""
        reached = {self.origin: len(self.lines[self.origin])}
        todo = [self.origin]
        while todo:
            stream = todo.pop()
            for _, entry in self.lines[stream][: reached[stream]]:
                if isinstance(entry, StreamPosition) and entry.at > reached.get(entry.stream, 0):
                    reached[entry.stream] = entry.at
                    todo.append(entry.stream)
        return [
            stream.name
            for stream, line in self.lines.items()
            if any(where != ALLOCATOR for where, _ in line[reached.get(stream, 0) :])
        ]

    def run(self, *, late: bool) -> None:
        """Repeat it. late: forked work runs only when it is waited for; otherwise as early as possible."""
        for contents, taken, let_go in self.pool.dead:
            if not taken < self.number <= let_go:  # else an earlier graph's, for this one to read
                _poison(contents)
        streams = {stream: Stream(self.machine, stream.name) for stream in self.lines}
        for stream, line in self.lines.items():
            streams[stream].jobs = [
                (
                    where,
                    partial(streams[entry.stream].run, entry.at)
                    if isinstance(entry, StreamPosition)
                    else entry,
                )
                for where, entry in line
            ]
        origin = streams[self.origin]
        while origin.done < len(origin.jobs):
            origin.run(origin.done + 1)
            for stream, line in self.lines.items():
                own = streams[stream]
                while not late and own is not origin and own.done < len(line):
                    entry = line[own.done][1]
                    if isinstance(entry, StreamPosition) and streams[entry.stream].done < entry.at:
                        break
                    own.run(own.done + 1)


class Machine:
    """One device. `total`: its memory in bytes. `waits`: whenever the host waited; `launches`: kernels by
    name; `compiled`: those that had to be compiled for a launch, by name and Triton's key; `captures`: each
    graph's streams. `blank`: nothing is computed, so shapes may be as large as in life."""

    def __init__(self, total: int = 1 << 30, late: Late = Late.ALL, blank: bool = False) -> None:
        self.total, self.late, self.blank = total, late, blank
        self.live = self.peak = 0
        self.lock = threading.RLock()
        self.main = Stream(self, "main")
        self.streams = [self.main]
        self.waits: list[Wait] = []
        self.launches: Counter[str] = Counter()
        self.bound: Counter[str] = Counter()  # of `launches`, those that went past Triton
        self.compiled: set[tuple[str, str]] = set()
        self.greatest: dict[str, Any] = {}  # the arguments of the last launch of `greatest_kernel`
        self.pinned: list[tuple[int, int]] = []  # addresses, from and to, in order
        self.captures: list[int] = []
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
        """Launch a job on a stream, by default the current one."""
        with self.lock:
            stream = stream or self.current
            stream.kernel = None
            recording = self.capturing
            if recording is not None:
                if stream not in recording.lines:
                    raise Mistake(f"work on stream {stream.name} while {recording.origin.name} is captured")
                recording.lines[stream].append((here()[0], job))
                return
            if self.blank:
                return
            stream.jobs.append((here()[0], job))
            if not self.lags(stream):
                stream.run(len(stream.jobs))

    def lags(self, stream: Stream) -> bool:
        """Whether the stream runs only when something waits for it."""
        return self.late is Late.ALL or (stream is self.main) == (self.late is Late.MAIN)

    def place(self, stream: Stream) -> StreamPosition:
        """The position after all jobs of the stream so far."""
        recording = self.capturing
        if recording is not None and stream in recording.lines:
            return StreamPosition(stream, len(recording.lines[stream]), recording)
        return StreamPosition(stream, len(stream.jobs), None)

    def wait_for(self, stream: Stream, place: StreamPosition) -> None:
        """Let a stream wait for a position on another. In a capture this forks the other's graph."""
        with self.lock:
            recording = self.capturing
            if place.recording is not recording:
                raise Mistake("a captured graph waits for work outside of it, or work outside for a graph's")
            if recording is None:
                self.push(lambda: place.stream.run(place.at), stream)
                return
            stream.kernel = None
            recording.lines.setdefault(stream, []).append((here()[0], place))

    def wait(self, kind: str, *, flush: bool = True) -> None:
        """The host waits, or may wait, for its current stream."""
        if self.capturing is not None:
            raise Mistake(f"{kind} while a graph is captured, at {' < '.join(here())}")
        self.waits.append(Wait(kind, here()))
        if flush:
            self.catch_up(self.current)

    def catch_up(self, stream: Stream, place: int | None = None) -> None:
        """Run all jobs of a stream."""
        with self.lock:
            stream.run(len(stream.jobs) if place is None else place)

    def catch_up_all(self) -> None:
        """Run all jobs."""
        for stream in self.streams:
            self.catch_up(stream)

    # Memory

    def taken(self, memory: Memory) -> None:
        """A block was allocated. Raises torch's error if there is not enough memory."""
        with self.lock:
            pool = memory.graph.pool if memory.graph is not None else None
            size = memory.size if pool is None else max(memory.size - pool.free, 0)
            if self.live + size > self.total:
                memory.size = 0
                raise torch.OutOfMemoryError(f"{self.live} of {self.total} bytes are taken")
            if pool is not None:
                pool.free -= memory.size - size
            self.live += size
            self.peak = max(self.peak, self.live)

    def let_go(self, memory: Memory) -> None:
        """A block's last tensor was freed: the next allocation on its stream may write there."""
        if not memory.size or self.over:
            return
        with self.lock:
            contents = memory.bytes
            recording = memory.graph
            if recording is not None:
                pool = recording.pool
                pool.dead.append((contents, recording.number, pool.captures))
                recording.pool.free += memory.size
                if recording.over and self.recording is not None and self.recording.pool is pool:
                    recording = self.recording  # which is the next to use it
                if not recording.over and memory.stream in recording.lines:
                    recording.lines[memory.stream].append((ALLOCATOR, lambda: _poison(contents)))
                return
            self.live -= memory.size
            if self.blank:
                return
            stream = memory.stream
            for other, place in memory.also:
                stream.jobs.append(("record_stream", lambda o=other, p=place: o.run(p)))
            stream.jobs.append((ALLOCATOR, lambda: _poison(contents)))

    def pin(self, size: int) -> torch.Tensor:
        """Host memory that the device reads directly. It stays, because its last reader is unknown."""
        memory = _aligned(max(size, 1))
        insort(self.pinned, (memory.data_ptr(), memory.data_ptr() + memory.numel()))
        self._kept.append(memory)
        return memory[:size]

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor is in such memory."""
        at = tensor.data_ptr()
        before = bisect_right(self.pinned, at, key=itemgetter(0))
        return before > 0 and at < self.pinned[before - 1][1]

    # Graphs

    @contextmanager
    def capture(self, pool: Pool, stream: Stream) -> Iterator[Recording]:
        """Within the block, launches of this thread on the stream are recorded, and on streams forked from
        it."""
        recording = self.recording = Recording(self, pool, stream, threading.get_ident())
        try:
            yield recording
            if unjoined := recording.unjoined():
                raise Mistake(f"the capture ends before {', '.join(unjoined)} is joined")
            self.captures.append(len(recording.lines))
        finally:
            recording.over, self.recording = True, None

    def replay(self, recording: Recording) -> None:
        """Launch a graph: all its jobs, again."""
        if self.capturing is not None:
            raise Mistake("a graph is replayed while another is captured")
        self.push(lambda: recording.run(late=self.late is not Late.MAIN))


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
