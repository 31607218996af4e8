"""Memory for large long-lived tensors. Some can be lent: the KV cache lends it to adapters and gets it
back."""

import ctypes
import logging
import mmap
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from personae.errors import DriverError
from personae.kernels.cgroup import memory_limit
from personae.kernels.malloc import libc
from personae.kernels.vmm import DeviceMemory, Driver

_log = logging.getLogger("personae.kernels")
_UNRESERVED = 0x4000  # MAP_NORESERVE, which Python's mmap may lack; much of the mapping is never written


class Memory(Protocol):
    """A device's memory. A reserved range keeps its addresses. The memory behind it can be given back and
    backed again; its content is then arbitrary.

    lends: whether memory that is given back can be used for other tensors. granule: the number of bytes that
    is given back or backed at once; parts are multiples of it, except at the end of a tensor. 0: memory comes
    when it is written, and is freed in whole pages of the system.
    """

    lends: bool
    granule: int

    @property
    def free(self) -> int:
        """How many granules are free."""

    def reserve(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor without memory: a part must be backed before anything touches it.

        A view that is passed to a Triton kernel needs memory at its first address, even if the kernel does
        not read it: the launcher asks the driver about that address (CU_POINTER_ATTRIBUTE_DEVICE_POINTER),
        and refuses one that no kernel can access.
        """

    def back(self, part: Tensor) -> None:
        """Put memory behind a contiguous part that has none."""

    def give_back(self, part: Tensor) -> None:
        """Free the memory of a contiguous part for others. Nothing may use the part any more."""


class HostMemory:
    """The system's memory: the system maps pages when they are written and unmaps them when they are
    freed."""

    lends = True
    granule = free = 0

    def reserve(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See Memory. The tensor is zero."""
        return zeros(shape, dtype, torch.device("cpu"))

    def back(self, part: Tensor) -> None:
        """Does nothing: memory comes when it is written."""

    def give_back(self, part: Tensor) -> None:
        """See Memory. Frees whole pages of the system, on Linux only."""
        if sys.platform != "linux":
            return
        begin = -(-part.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (part.data_ptr() + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            # This may fail if the memory is locked; then it is not freed.
            libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


class FixedMemory:
    """A device's memory as torch allocates it: backed from the start, never given back."""

    lends = False
    granule = free = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reserve(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See Memory. The tensor is zero."""
        return zeros(shape, dtype, self._device)

    def back(self, part: Tensor) -> None:
        """Does nothing: the memory is there."""

    def give_back(self, part: Tensor) -> None:
        """Does nothing: the memory stays."""


def main_memory() -> int | None:
    """Bytes of memory of the machine, or its container's limit if that is lower; None if the system does not
    say."""
    if sys.platform == "win32":
        return None
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit()
    return there if limit is None else min(there, limit)


def granule_of(device: torch.device) -> int | None:
    """The granule of memory that can be lent on a device; None, with a warning, if the device cannot lend
    memory."""
    if device.type == "cpu":
        return HostMemory.granule
    try:
        return Driver(device).granule
    except DriverError as error:
        warn_of_fixed_shares(error)
        return None


def warn_of_fixed_shares(error: DriverError) -> None:
    """Warn that memory cannot be lent on this GPU, and why."""
    _log.warning("Adapters and the KV cache have fixed shares of the GPU's memory: %s", error.message)


def memory_of(device: torch.device, lends: int) -> Memory:
    """A device's memory. On a GPU: `lends` bytes that can be lent, or, if 0, memory that cannot. Raises
    DriverError."""
    if device.type == "cpu":
        return HostMemory()
    return DeviceMemory(device, lends) if lends else FixedMemory(device)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros. On the CPU its memory comes when it is first written, in huge pages if possible.

    `torch.zeros` writes all of it at once, in small pages. Huge pages make reading a whole tensor, as each
    step does, measurably faster. The system maps the memory, because an allocator may return memory that was
    written before and that begins where a kernel's reads cross cache lines.
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
    """Give back pages[id] for each id. Each run of neighbouring pages is one piece, because the system takes
    about 20 us for each call on huge pages."""
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
    """As `giving_back_pages`, in one call."""
    for _ in giving_back_pages(memory, pages, ids):
        pass
