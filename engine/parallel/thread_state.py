"""What torch has for each thread, for a thread that does a part of another's work."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


def thread_state() -> Callable[[], AbstractContextManager[None]]:
    """What another thread enters to compute as this one does now: with its mode of gradients, and on a GPU
    on its device and stream. So what both launch runs in the order of their launches, and both use the memory
    of one stream."""
    gradients = torch.is_grad_enabled()
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no types here
    stream = torch.cuda.current_stream() if used else None

    @contextmanager
    def entered() -> Iterator[None]:
        with torch.set_grad_enabled(gradients), torch.cuda.stream(stream):
            yield

    return entered
