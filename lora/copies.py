"""Copies from the host to a device: on a GPU in parallel with its steps.

There they are in an order of their own, on a stream of their own: a step goes on while an adapter
arrives, and one that needs it waits, on the device, for as much of it as it is about to read. Memory of the
host that the device reads by itself is pinned: copies from elsewhere would hold up the thread that asks.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from personae.lora.single import scaled


class CopyEvent(Protocol):
    """A place in the order of the copies."""

    @property
    def reached(self) -> bool:
        """Whether all before it has arrived."""

    def wait(self) -> None:
        """Later work of the device waits for all earlier copies. The caller does not wait."""


class Copies(Protocol):
    """One order of copies."""

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory on the host to copy from, its values undefined. It may be freed as soon as `copy` returns,
        and not be written again before the copy has arrived."""

    def begin(self) -> None:
        """Later copies wait for the device's earlier work, which may read what will be
        written."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy from the host, soon."""

    def clear(self, target: Tensor) -> None:
        """Fill with zeros, in the same order."""

    def mark(self) -> CopyEvent | None:
        """The place behind all of them so far; None if they have arrived."""

    def overlap(self) -> AbstractContextManager[object]:
        """Work launched within the block is ordered with the copies: its readers wait for the copies, and not
        for the steps that were launched since `begin`."""


class HostCopies:
    """Copies within the host's memory: done when asked for, by the thread that asks."""

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See Copies."""
        return torch.empty(shape, dtype=dtype)

    def begin(self) -> None:
        """See Copies; steps run on the same thread."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See Copies."""
        scaled(target, source)

    def clear(self, target: Tensor) -> None:
        """See Copies."""
        for row in target:
            row.zero_()

    def mark(self) -> None:
        """There is nothing to wait for."""

    def overlap(self) -> AbstractContextManager[object]:
        """See Copies."""
        return nullcontext()


class StreamCopies:
    """Copies on a CUDA stream. Made and used on the thread that runs the steps."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types here

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See Copies; torch keeps pinned memory until the copies from it have arrived."""
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
        return _CudaCopyEvent(event)

    def overlap(self) -> AbstractContextManager[object]:
        """See Copies."""
        return torch.cuda.stream(self._stream)


class _CudaCopyEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    @property
    def reached(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]  # as above

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory of the host that a GPU reads by itself; for any thread."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)
