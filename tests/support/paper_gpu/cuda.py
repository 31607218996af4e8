"""The doubles of torch.cuda, and how they are installed."""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from paper_gpu import launches, machine
from paper_gpu.driver import PaperDriver
from paper_gpu.machine import Late, Machine, Mistake, Pool, Recording
from paper_gpu.tensors import CUDA, OnPaper, making, moving, pinned_like

NAME = "a GPU made of paper"
POLLS = 500  # after this many polls of an event, even a late device has reached it


class PaperGpu:
    """Within `with` the calling thread has a GPU. Other threads call `adopt_this_thread`, or have it while
    they are on one of its streams (`torch.cuda.stream`).

    gpu.machine records what happened. processors: multiprocessors. capability: as torch reports it. granule:
    of its virtual memory, whose driver is gpu.driver; None: cuda-bindings is not installed.
    """

    def __init__(
        self,
        total: int = 1 << 30,
        *,
        late: Late = Late.ALL,
        blank: bool = False,
        processors: int = 4,
        capability: tuple[int, int] = (9, 0),
        granule: int | None = None,
    ) -> None:
        self.machine = Machine(total, late, blank)
        self.processors, self.capability = processors, capability
        self.driver = None if granule is None else PaperDriver(self.machine, granule)
        self._stack = ExitStack()

    def __enter__(self) -> "PaperGpu":
        stack = self._stack
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for target, name, value in self._doubles():
            patch.setattr(target, name, value)
        patch.setitem(sys.modules, "cuda.bindings.driver", self.driver)
        stack.enter_context(_device_guard())
        launches.install(self.machine, self.capability, patch)
        stack.enter_context(OnPaper(self.machine))
        return self

    def __exit__(self, *error: Any) -> None:
        self.machine.over = True
        try:
            if self.driver is not None and error[0] is None:
                self.machine.catch_up_all()
                self.driver.check()
        finally:
            self._stack.__exit__(*error)

    def adopt_this_thread(self) -> None:
        """From now on, everything that this thread creates on `cuda` is simulated too."""
        OnPaper(self.machine).__enter__()

    @contextmanager
    def waiting(self) -> Iterator[list[machine.Wait]]:
        """The waits within the block."""
        before = len(self.machine.waits)
        found: list[machine.Wait] = []
        try:
            yield found
        finally:
            found += self.machine.waits[before:]

    def _doubles(self) -> Iterator[tuple[Any, str, Any]]:
        here, cuda = self.machine, torch.cuda
        properties = SimpleNamespace(
            multi_processor_count=self.processors,
            total_memory=here.total,
            name=NAME,
            major=self.capability[0],
            minor=self.capability[1],
        )
        plain_empty, plain_full = torch.empty, torch.full
        for name, value in {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda _device: None,
            "get_device_capability": lambda _device=None: self.capability,
            "get_device_properties": lambda _device=None: properties,
            "get_device_name": lambda _device=None: NAME,
            "mem_get_info": lambda _device=None: (here.total - here.live, here.total),
            "memory_allocated": lambda _device=None: here.live,
            "memory_reserved": lambda _device=None: here.live,
            "max_memory_reserved": lambda _device=None: here.peak,
            "reset_peak_memory_stats": lambda _device=None: setattr(here, "peak", here.live),
            "empty_cache": lambda: None,
            "synchronize": lambda _device=None: _synchronize(here),
            "current_stream": lambda _device=None: Stream(here, here.current),
            "default_stream": lambda _device=None: Stream(here, here.main),
            "set_stream": lambda stream: setattr(here, "current", stream.stream),
            "stream": partial(_on, here),
            "Stream": partial(Stream, here),
            "Event": partial(Event, here),
            "CUDAGraph": partial(Graph, here),
            "graph": partial(_capture, here),
            "graph_pool_handle": Pool,
            "is_current_stream_capturing": lambda: here.capturing is not None,
            "_sleep": lambda _cycles: here.push(lambda: None),
        }.items():
            yield cuda, name, value
        yield torch.version, "cuda", "13.0"
        yield torch, "empty", partial(_pinning, here, plain_empty)  # on threads that know no paper
        yield torch, "full", partial(_pinning, here, plain_full)
        yield torch, "tensor", making(torch.tensor)
        if self.driver is not None:
            yield torch, "as_tensor", lambda data, device: self.driver.tensor(data)
        yield torch.Tensor, "to", moving(torch.Tensor.to)
        yield torch, "Generator", _generator(torch.Generator)


def _pinning(here: Machine, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs.pop("pin_memory", False):
        return pinned_like(here, make(*args, **kwargs))
    return make(*args, **kwargs)


def _generator(original: Any) -> Any:
    class Generator(original):  # type: ignore[misc]  # torch's own
        """A generator of any device; its numbers are the host's."""

        def __new__(cls, device: Any = "cpu") -> Any:
            made = original.__new__(cls)
            made.on_paper = torch.device(device).type == "cuda"
            return made

        @property
        def device(self) -> torch.device:
            return CUDA if self.on_paper else torch.device("cpu")

    return Generator


def _synchronize(here: Machine) -> None:
    here.wait("the host waits for the device", flush=False)
    here.catch_up_all()


class Stream:
    """A handle."""

    def __init__(self, here: Machine, stream: machine.Stream | None = None, **_options: Any) -> None:
        self.here = here
        self.stream = stream or here.side()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream is self.stream

    def __hash__(self) -> int:
        return id(self.stream)

    def wait_stream(self, other: "Stream") -> None:
        self.here.wait_for(self.stream, self.here.place(other.stream))

    def wait_event(self, event: "Event") -> None:
        if event.place is not None:
            self.here.wait_for(self.stream, event.place)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self.here)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.here.wait("the host waits for a stream", flush=False)
        self.here.catch_up(self.stream)


class Event:
    """A position on a stream."""

    def __init__(self, here: Machine, **_options: Any) -> None:
        self.here = here
        self.place: machine.StreamPosition | None = None
        self.polls = 0

    def record(self, stream: Stream | None = None) -> None:
        self.place = self.here.place(self.here.current if stream is None else stream.stream)
        self.polls = 0

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Stream(self.here, self.here.current)).wait_event(self)

    def query(self) -> bool:
        if self.here.capturing is not None:
            raise Mistake("an event is asked for while a graph is captured")
        self.polls += 1
        if self.place is None:
            return True
        if self.polls > POLLS:
            self.here.catch_up(self.place.stream, self.place.at)
        return self.place.stream.done >= self.place.at

    def synchronize(self) -> None:
        self.here.wait("the host waits for an event", flush=False)
        if self.place is not None:
            self.here.catch_up(self.place.stream, self.place.at)

    def elapsed_time(self, other: "Event") -> float:
        if not (self.query() and other.query()):
            raise RuntimeError("the events have not been reached")
        return 1.0


@contextmanager
def _on(here: Machine, stream: Stream | None) -> Iterator[None]:
    before = here.current
    if stream is not None:
        here.current = stream.stream
    known = any(isinstance(mode, OnPaper) for mode in _get_current_dispatch_mode_stack())
    try:
        with nullcontext() if known else OnPaper(here):
            yield
    finally:
        here.current = before


class Graph:
    """A captured graph."""

    def __init__(self, here: Machine) -> None:
        self.here = here
        self.recording: Recording | None = None

    def replay(self) -> None:
        if self.recording is None:
            raise RuntimeError("nothing was captured")
        self.here.replay(self.recording)

    def pool(self) -> Pool:
        assert self.recording is not None
        return self.recording.pool


@contextmanager
def _capture(
    here: Machine,
    graph: Graph,
    pool: Pool | None = None,
    stream: Stream | None = None,
    capture_error_mode: str = "global",
) -> Iterator[None]:
    if capture_error_mode not in ("global", "thread_local", "relaxed"):
        raise ValueError(capture_error_mode)
    _synchronize(here)
    before = here.current
    stream = stream or Stream(here)
    here.current = stream.stream
    # A capture that fails raises at its end as well, and leaves its stream behind as the current one.
    with here.capture(pool or Pool(), stream.stream) as recording:
        yield
    graph.recording = recording
    here.current = before


@contextmanager
def _device_guard() -> Iterator[None]:
    """Have torch believe that somebody looks after devices called `cuda`: the one who does for `meta`, which
    is to do nothing. A build without CUDA refuses to index such tensors otherwise."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 32).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # c10::DeviceType
    before, guards[cuda] = guards[cuda], guards[meta]
    try:
        yield
    finally:
        guards[cuda] = before
