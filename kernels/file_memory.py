"""Memory that is a part of a file, so it stays when the process ends that wrote it. Linux only."""

import ctypes
import mmap
from math import prod

import torch
from torch import Tensor

from personae.kernels.mappable import HUGE, MADV_COLLAPSE, advise, call, padded
from personae.kernels.memory import zeros

ALIGNED = 4096  # bytes: a reserved tensor begins at a multiple
_MAP_FIXED = 0x10
_MADV_REMOVE = 9
_MADV_POPULATE_WRITE = 23  # since Linux 5.14


class FileMemory:
    """Implements `kernels.memory.Memory` with the `size` bytes of an open file from `offset` on, a multiple
    of `HUGE`. The same reservations in the same order have the same places in the file. `huge`: a byte for
    each `HUGE` bytes, 1 if these are on a huge page; it stays with the file. Raises OSError."""

    lends = True
    granule = free = 0

    def __init__(self, file: int, offset: int, size: int, huge: memoryview) -> None:
        room = zeros((padded(size) + HUGE,), torch.uint8, torch.device("cpu"))
        begin = -room.data_ptr() % HUGE
        self._bytes = room[begin : begin + padded(size)]
        flags, writable = mmap.MAP_SHARED | _MAP_FIXED, mmap.PROT_READ | mmap.PROT_WRITE
        self._address = self._bytes.data_ptr()
        call("mmap", self._address, padded(size), writable, flags, file, ctypes.c_long(offset))
        self._reserved = 0
        self._huge = huge

    def reserve(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See Memory. The tensor has what the file has there."""
        begin, size = self._reserved, prod(shape) * dtype.itemsize
        self._reserved += -(-size // ALIGNED) * ALIGNED
        return self._bytes[begin : begin + size].view(dtype).view(shape)

    def map(self, part: Tensor) -> None:
        """Does nothing: memory comes when it is written."""

    def enlarge(self, part: Tensor) -> None:
        """Have the memory of a contiguous part, which is about to be used, on huge pages. A system does so by
        itself with memory that is not of a file. If it cannot, nothing happens."""
        begin = part.data_ptr() - self._address
        for number in range(begin // HUGE, -(-(begin + part.nbytes) // HUGE)):
            if not self._huge[number]:
                place = self._address + number * HUGE
                advise(place, mmap.PAGESIZE, _MADV_POPULATE_WRITE)  # where all is empty nothing is enlarged
                advise(place, HUGE, MADV_COLLAPSE)
                self._huge[number] = 1

    def unmap(self, part: Tensor) -> None:
        """See Memory. Frees whole pages of the system; the file is zero there."""
        begin = -(-part.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (part.data_ptr() + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            advise(begin, end - begin, _MADV_REMOVE)
            first = (begin - self._address) // HUGE
            last = -(-(end - self._address) // HUGE)
            self._huge[first:last] = bytes(last - first)
