"""How long work takes on the device: captured in a graph, replayed, timed with events; the median counts."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.cuda import CUDAGraph, Event, Stream

Call = Callable[[], object]
REPLAYS = 20


def replay_time(calls: Sequence[Call], replays: int = REPLAYS) -> float:
    """Microseconds per call of `calls`, run one after the other in one graph; the median of the replays.

    Each call should read different memory, together several times the cache, so that weights are cold.
    """
    stream = Stream()  # type: ignore[no-untyped-call]  # torch's own annotation is missing
    stream.wait_stream(torch.cuda.current_stream())  # which is still making what the calls read
    with torch.cuda.stream(stream):
        for call in calls[:2]:  # compiles
            call()
    stream.synchronize()
    graph = CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(replays):
        begun, ended = (Event(enable_timing=True) for _ in "be")  # type: ignore[no-untyped-call]  # as above
        begun.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(begun.elapsed_time(ended))
    return statistics.median(times) * 1000 / len(calls)


def event_time(call: Call, repeats: int = REPLAYS) -> float:
    """Microseconds from a call's first work on the device to its last, including launches; the median."""
    call()  # compiles
    times: list[float] = []
    for _ in range(repeats):
        begun, ended = (Event(enable_timing=True) for _ in "be")  # type: ignore[no-untyped-call]  # as above
        begun.record()
        call()
        ended.record()
        ended.synchronize()
        times.append(begun.elapsed_time(ended))
    return statistics.median(times) * 1000


def copy_bandwidth(size: int = 1 << 32) -> float:
    """Bytes per microsecond of a large copy, counting reads and writes."""
    source = torch.empty(size // 2, dtype=torch.uint8, device="cuda").random_(0, 256)
    target = torch.empty_like(source)
    return size / replay_time([lambda: target.copy_(source)])


@dataclass(slots=True)
class Deadline:
    """The end of the run's time. Parts that would begin after it are left out, and the report says so."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """The deadline after this many seconds."""
        return cls(time.monotonic() + seconds)

    @property
    def passed(self) -> bool:
        """Whether there is no time left."""
        return time.monotonic() >= self.at
