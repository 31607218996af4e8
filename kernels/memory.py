"""Large tensors that live long, and memory that can be lent: the KV cache's to adapters, and back."""

import ctypes
import logging
import mmap
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from personae.errors import DriverError
from personae.kernels.cgroup import memory_limit
from personae.kernels.vmm import DeviceMemory, Driver

_log = logging.getLogger("personae.kernels")
_UNRESERVED = 0x4000  # MAP_NORESERVE, which Python's mmap may not know: much of what is mapped stays empty


class Memory(Protocol):
    """A device's memory. What is reserved keeps its addresses; what is behind them can be given back and had
    anew, and whoever has it next finds there whatever it was left with.

    lends: whether what is given back is there for others. granule: bytes of which parts that are given back
    or backed are multiples, but where a tensor ends; 0: memory comes when it is written, and goes by whole
    pages of the system.
    """

    lends: bool
    granule: int

    @property
    def free(self) -> int:
        """How many granules are free."""

    def reserve(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with no memory yet: nothing may touch a part before it is backed.

        A view that a kernel of Triton's is given must have memory where it begins, whatever the kernel reads:
        the launcher asks the driver about the address (CU_POINTER_ATTRIBUTE_DEVICE_POINTER), and refuses one
        that no kernel can access.
        """

    def back(self, part: Tensor) -> None:
        """Have memory behind a contiguous part that has none."""

    def give_back(self, part: Tensor) -> None:
        """Let others have the memory of a contiguous part, which nothing touches any more."""


class HostMemory:
    """The system's memory, which maps pages when they are written and unmaps them when they are freed."""

    lends = True
    granule = free = 0

    def reserve(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See Memory; zeros."""
        return zeros(shape, dtype, torch.device("cpu"))

    def back(self, part: Tensor) -> None:
        """Memory comes when it is written."""

    def give_back(self, part: Tensor) -> None:
        """See Memory: whole pages of the system, on Linux alone."""
        if sys.platform != "linux":
            return
        begin = -(-part.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (part.data_ptr() + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            # May fail where memory is locked; then it is not given back.
            _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


class FixedMemory:
    """A device's memory as torch has it: there from the start, and it stays."""

    lends = False
    granule = free = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reserve(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See Memory; zeros."""
        return zeros(shape, dtype, self._device)

    def back(self, part: Tensor) -> None:
        """It is there."""

    def give_back(self, part: Tensor) -> None:
        """It stays."""


def main_memory() -> int | None:
    """Bytes of memory that the machine has, or its container may have; None where the system does not say."""
    if sys.platform == "win32":
        return None
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit()
    return there if limit is None else min(there, limit)


def granule_of(device: torch.device) -> int | None:
    """The granule of memory that can be lent on a device; None where none can, which is said."""
    if device.type == "cpu":
        return HostMemory.granule
    try:
        return Driver(device).granule
    except DriverError as error:
        warn_of_fixed_shares(error)
        return None


def warn_of_fixed_shares(error: DriverError) -> None:
    """Say that memory cannot be lent on this GPU, and why."""
    _log.warning("adapters and the KV cache have fixed shares of the GPU's memory: %s", error.message)


def memory_of(device: torch.device, lends: int) -> Memory:
    """A device's memory; on a GPU `lends` bytes that can be lent, or, if 0, what cannot. Raises
    DriverError."""
    if device.type == "cpu":
        return HostMemory()
    return DeviceMemory(device, lends) if lends else FixedMemory(device)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On the CPU they take memory when it is first written, where the system can on huge pages.

    `torch.zeros` writes all of it at once, on small pages; huge ones make reading a tensor from end to end,
    as each step does, measurably faster. They are asked of the system itself: what an allocator has at hand
    was written before, and begins where a kernel's reads lie on two cache lines.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = prod(shape) * dtype.itemsize
    if sys.platform != "linux":
        memory = mmap.mmap(-1, max(size, 1))
    else:
        memory = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNRESERVED)
        with suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size].view(dtype).view(shape)


def giving_back_pages(memory: Memory, pages: Tensor, ids: Iterable[int]) -> Iterator[None]:
    """Give pages[id] back for each of them, neighbours in one go, each of which is a piece: a place on
    a huge page takes the system some 20 us."""
    run: list[int] = []
    for id in sorted(ids):
        if run and id != run[-1] + 1:
            memory.give_back(pages[run[0] : run[-1] + 1])
            yield
            run = []
        run.append(id)
    if run:
        memory.give_back(pages[run[0] : run[-1] + 1])
        yield


def give_back_pages(memory: Memory, pages: Tensor, ids: Iterable[int]) -> None:
    """`giving_back_pages`, all at once."""
    for _ in giving_back_pages(memory, pages, ids):
        pass


def give_back_freed() -> None:
    """Let the system have what was freed between things that stay, which malloc keeps; glibc alone can."""
    if sys.platform == "linux" and (trim := getattr(_libc(), "malloc_trim", None)) is not None:
        trim(0)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
