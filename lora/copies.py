"""Copies from the host to a device. On a GPU they run in parallel with its steps.

They have their own order, on their own stream. A step goes on while an adapter is being copied. A step that
needs the adapter waits, on the device, for the part that it is about to read. The device reads host memory
directly only if it is pinned; copies from other memory would delay the calling thread.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from personae.lora.single import scaled


class CopyEvent:
    """A position in the order of the copies."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    @property
    def reached(self) -> bool:
        """Whether all copies before it are done."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]  # torch has no types here

    def wait(self) -> None:
        """Later work of the device waits for all earlier copies. The caller does not wait."""
        torch.cuda.current_stream().wait_event(self._event)


class Copies:
    """An ordered sequence of copies: here within the host's memory, where the calling thread does them at
    once."""

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory on the host to copy from, with undefined values. It may be freed as soon as `copy` returns.
        It must not be written again before the copy is done."""
        return torch.empty(shape, dtype=dtype)

    def begin(self) -> None:
        """Later copies wait for the device's earlier work, which may read the memory that they write. (On a
        CPU, steps run on the same thread.)"""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy from the host, asynchronously."""
        scaled(target, source)

    def clear(self, target: Tensor) -> None:
        """Fill with zeros, in the same order."""
        for row in target:
            row.zero_()

    def mark(self) -> CopyEvent | None:
        """An event after all copies so far; None if they are done."""
        return None

    def overlap(self) -> AbstractContextManager[object]:
        """Work launched within the block is ordered with the copies: its readers wait for the copies, and not
        for the steps launched since `begin`."""
        return nullcontext()


class StreamCopies(Copies):
    """Copies on a CUDA stream. The thread that runs the steps makes and uses it."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types here

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See Copies. torch keeps pinned memory until the copies from it are done."""
        return pinned(shape, dtype)

    def begin(self) -> None:
        """See Copies."""
        self._stream.wait_stream(torch.cuda.current_stream())

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See Copies."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def clear(self, target: Tensor) -> None:
        """See Copies."""
        with torch.cuda.stream(self._stream):
            target.zero_()

    def mark(self) -> CopyEvent:
        """See Copies."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # as above
        event.record(self._stream)
        return CopyEvent(event)

    def overlap(self) -> AbstractContextManager[object]:
        """See Copies."""
        return torch.cuda.stream(self._stream)


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Host memory that a GPU reads directly. Any thread may call this."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)
