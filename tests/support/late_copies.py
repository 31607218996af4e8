"""Copies that arrive as late as possible: only when something waits for them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from personae.lora.copies import Copies, CopyEvent


class LateCopies(Copies):
    """On the CPU. `log` has the requested copies; `arrived` counts those that have arrived."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.arrived = 0
        self._copies: list[Callable[[], object]] = []

    def __len__(self) -> int:
        return len(self._copies)

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype)

    def begin(self) -> None:
        self.log.append("begin")

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert target.dtype == source.dtype, "a device's own copies convert nothing"
        assert target.is_contiguous()
        assert source.is_contiguous()
        self._later("copy", lambda: target.copy_(source))

    def clear(self, target: Tensor) -> None:
        self._later("clear", target.zero_)

    def mark(self) -> "LateEvent":
        self.log.append("mark")
        return LateEvent(self, len(self._copies))

    def overlap(self) -> AbstractContextManager[None]:
        return nullcontext()

    def arrive(self, count: int) -> None:
        """Let the first so many copies arrive."""
        while self.arrived < count:
            self._copies[self.arrived]()
            self.arrived += 1

    def _later(self, what: str, copy: Callable[[], object]) -> None:
        self.log.append(what)
        self._copies.append(copy)


class LateEvent(CopyEvent):
    """An event after so many copies."""

    def __init__(self, copies: LateCopies, count: int) -> None:
        self._copies = copies
        self._count = count

    @property
    def reached(self) -> bool:
        return self._copies.arrived >= self._count

    def wait(self) -> None:
        self._copies.arrive(self._count)
