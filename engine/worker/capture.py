"""Recording work on a device, to repeat it later without Python: CUDA graphs.

A `Capture` records and repeats work: CUDA graphs on a GPU, and in tests a recorder that repeats the operators
on the same tensors.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

Cut = Callable[[Callable[[], None]], None]
"""Ends a graph, runs what it is given, and begins the next graph."""


class Capture(Protocol):
    """Records work on a device, to repeat it later without Python."""

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Runs the work and records it. Returns what repeats it, and its result, which each repetition
        overwrites."""

    def pieces(self, work: Callable[[Cut], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """As a call, but the work is cut: what it gives to `cut` runs between two graphs, anew each time."""


class CudaCapture:
    """CUDA graphs in one memory pool: one graph runs at a time, so all share their scratch memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types here

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """See Capture. Runs the work once before the capture, so that kernels are compiled and libraries
        initialised."""
        return self._captured(lambda _cut: work(), work)

    def pieces(self, work: Callable[[Cut], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """See Capture. Runs the work once before, too."""
        return self._captured(work, lambda: work(lambda run: run()))

    def _captured(
        self, work: Callable[[Cut], Tensor], rehearse: Callable[[], Tensor]
    ) -> tuple[Callable[[], None], Tensor]:
        here, steps = torch.cuda.current_stream(), list[Callable[[], None]]()
        try:
            torch.cuda.synchronize()
            with torch.cuda.stream(self._stream):
                rehearse()
            with ExitStack() as capturing:
                steps.append(self._begin(capturing))

                def cut(run: Callable[[], None]) -> None:
                    capturing.close()
                    with torch.cuda.stream(self._stream):
                        run()
                    steps.extend((run, self._begin(capturing)))

                result = work(cut)
        finally:
            torch.cuda.set_stream(here)  # a failed capture leaves its own stream set
        return steps[0] if len(steps) == 1 else partial(_run_all, steps), result

    def _begin(self, capturing: ExitStack) -> Callable[[], None]:
        """Begin a graph, until the stack is closed; what replays it."""
        graph = torch.cuda.CUDAGraph()
        # In this mode, other threads can go on copying adapters meanwhile.
        capturing.enter_context(
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        )
        replay: Callable[[], None] = graph.replay
        return replay


def _run_all(steps: list[Callable[[], None]]) -> None:
    for step in steps:
        step()
