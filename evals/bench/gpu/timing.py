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


def product_rate(size: int = 8192) -> float:
    """Operations per microsecond of cuBLAS's product of two square matrices in bfloat16."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in "ab")
    return 2 * size**3 / replay_time([lambda: a @ b])


@dataclass(frozen=True, slots=True)
class Roofline:
    """What this device does at most. bandwidth: bytes per microsecond of a large copy. rate: operations per
    microsecond of a large product in bfloat16."""

    bandwidth: float
    rate: float

    def floor(self, moved: float, operations: float = 0.0) -> float:
        """The least microseconds in which so many bytes can be moved and so many operations done."""
        return max(moved / self.bandwidth, operations / self.rate)


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
