"""Memory for large long-lived tensors. It is mapped behind them and unmapped, so that the KV cache can lend
some to adapters."""

import ctypes
import logging
import mmap
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import groupby
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from personae.errors import DriverError
from personae.kernels.malloc import libc
from personae.kernels.vmm import DeviceMemory, Driver

_log = logging.getLogger("personae.kernels")
_UNRESERVED = 0x4000  # MAP_NORESERVE, which Python's mmap may lack; much of the mapping is never written


class Memory(Protocol):
    """A device's memory. A reserved range keeps its addresses. The memory behind it can be unmapped and
    mapped again; its content is then arbitrary.

    lends: whether memory that is unmapped can be used for other tensors. granule: the number of bytes that is
    mapped at once; parts are multiples of it, except at the end of a tensor. 0: memory comes when it is
    written, and is unmapped in whole pages of the system.
    """

    lends: bool
    granule: int

    @property
    def free(self) -> int:
        """How many granules are free."""

    def reserve(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor without memory: a part must be mapped before anything touches it.

        A view that is passed to a Triton kernel needs memory at its first address, even if the kernel does
        not read it: the launcher asks the driver about that address (CU_POINTER_ATTRIBUTE_DEVICE_POINTER),
        and refuses one that no kernel can access.
        """

    def map(self, part: Tensor) -> None:
        """Put memory behind a contiguous part that has none."""

    def unmap(self, part: Tensor) -> None:
        """Free the memory of a contiguous part for others. Nothing may use the part any more."""


class TorchMemory:
    """A device's memory as torch has it. On a CPU the system maps pages when they are written. On a GPU all
    of it is mapped from the start and stays."""

    granule = free = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.lends = device.type == "cpu"

    def reserve(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See Memory. The tensor is zero."""
        return zeros(shape, dtype, self._device)

    def map(self, part: Tensor) -> None:
        """Does nothing: memory comes when it is written, or is there."""

    def unmap(self, part: Tensor) -> None:
        """See Memory. Frees whole pages of the system, on Linux only."""
        if not self.lends or sys.platform != "linux":
            return
        begin = -(-part.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (part.data_ptr() + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            # This may fail if the memory is locked; then it is not freed.
            libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def granule_of(device: torch.device) -> int | None:
    """The granule of memory that can be lent on a device; None, with a warning, if the device cannot lend
    memory."""
    if device.type == "cpu":
        return 0
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
    return DeviceMemory(device, lends) if lends and device.type != "cpu" else TorchMemory(device)


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


def unmapping_pages(memory: Memory, pages: Tensor, ids: Iterable[int]) -> Iterator[None]:
    """Unmap pages[id] for each id. Each run of neighbouring pages is one piece, because the system takes
    about 20 us for each call on huge pages."""
    numbered = enumerate(sorted(ids))
    for _, run in groupby(numbered, lambda each: each[1] - each[0]):  # neighbours have the same difference
        found = [id for _, id in run]
        memory.unmap(pages[found[0] : found[-1] + 1])
        yield
