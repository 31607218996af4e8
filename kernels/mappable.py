"""Memory for a model's packed weights, which can become a mapping of a file with the same bytes.

All processes that map a file share one copy of it, the system's cache of files. Linux only.
"""

import ctypes
import mmap

import torch
from torch import Tensor

from personae.kernels.malloc import libc
from personae.kernels.memory import zeros

HUGE = 2 << 20  # bytes of a huge page
_MAP_FIXED = 0x10
_MADV_POPULATE_READ = 22  # since Linux 5.14


class MappableMemory:
    """`bytes`: [size] uint8, zeros that take memory when they are written. It begins at a huge page."""

    def __init__(self, size: int) -> None:
        room = zeros((padded(size) + HUGE,), torch.uint8, torch.device("cpu"))
        begin = -room.data_ptr() % HUGE
        self.bytes: Tensor = room[begin : begin + size]

    def map(self, file: int) -> None:
        """Replaces the memory by the beginning of a file, which can only be read. Its bytes must be those that
        are here, if anything has read these. What reads at the same time is not disturbed.

        Raises OSError.
        """
        address, size = self.bytes.data_ptr(), padded(self.bytes.nbytes)
        call = libc().mmap
        call.restype = ctypes.c_void_p
        call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        ctypes.set_errno(0)
        found = call(address, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, file, 0)
        if found != address:
            raise OSError(ctypes.get_errno(), "the packed weights cannot be mapped")
        self._advise(mmap.MADV_HUGEPAGE)  # where the file system has them

    def populate(self) -> None:
        """Reads what is not in memory, so that no step waits for it. Before Linux 5.14 it does nothing."""
        self._advise(_MADV_POPULATE_READ)

    def _advise(self, advice: int) -> None:
        """Advice may be refused; then it is not followed."""
        size = padded(self.bytes.nbytes)
        libc().madvise(ctypes.c_void_p(self.bytes.data_ptr()), ctypes.c_size_t(size), advice)


def padded(size: int) -> int:
    """`size` in whole huge pages: that much of a file is mapped."""
    return -(-size // HUGE) * HUGE
