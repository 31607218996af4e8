"""Memory for a model's packed weights, which can become a mapping of a file with the same bytes.

All processes that map a file share one copy of it, the system's cache of files. Linux only.
"""

import ctypes
import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from personae.kernels.malloc import libc
from personae.kernels.memory import zeros

HUGE = 2 << 20  # bytes of a huge page
_MAP_FIXED = 0x10
_MREMAP_MAYMOVE_FIXED = 3
_MADV_POPULATE_READ = 22  # since Linux 5.14
MADV_COLLAPSE = 25  # since Linux 6.1


class MappableMemory:
    """`bytes`: [size] uint8, zeros that take memory when they are written. It begins at a huge page."""

    def __init__(self, size: int) -> None:
        room = zeros((padded(size) + HUGE,), torch.uint8, torch.device("cpu"))
        begin = -room.data_ptr() % HUGE
        self.bytes: Tensor = room[begin : begin + size]
        self._address, self._size = self.bytes.data_ptr(), padded(size)

    def map(self, file: int) -> None:
        """Replaces the memory by the beginning of a file, which can only be read. Its bytes must be those
        that are here, if anything has read these. What reads at the same time is not disturbed.

        Raises OSError.
        """
        flags = mmap.MAP_SHARED | _MAP_FIXED
        call("mmap", self._address, self._size, mmap.PROT_READ, flags, file, ctypes.c_long(0))
        advise(self._address, self._size, mmap.MADV_HUGEPAGE)  # where the file system has them

    def settle(self, *, shared: bool) -> None:
        """After `map`: reads what is not in memory, so that no step waits for it, and sees to huge pages. If
        the file can't have those and need not be `shared`, it is copied: steps of a few rows would take a
        fifth longer.

        Raises OSError.
        """
        advise(self._address, self._size, _MADV_POPULATE_READ)
        advise(self._address, self._size, MADV_COLLAPSE)
        if not shared and not self._on_huge_pages():
            self._copy()

    def _on_huge_pages(self) -> bool:
        """Whether a mapped file is, according to the system."""
        lines = iter(Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines())
        for line in lines:
            if line.startswith(f"{self._address:x}-"):
                break
        huge = next((line for line in lines if line.startswith("FilePmdMapped:")), "FilePmdMapped: 0 kB")
        return int(huge.split()[1]) * 1024 > 0.9 * self._size

    def _copy(self) -> None:
        """Replaces a mapping by memory with the same bytes."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        room = call("mmap", None, self._size + HUGE, writable, flags, -1, ctypes.c_long(0))
        begin = room + -room % HUGE
        advise(begin, self._size, mmap.MADV_HUGEPAGE)
        ctypes.memmove(begin, self._address, self._size)
        call("mprotect", begin, self._size, mmap.PROT_READ)
        to = ctypes.c_void_p(self._address)
        call("mremap", begin, self._size, ctypes.c_size_t(self._size), _MREMAP_MAYMOVE_FIXED, to)
        if begin > room:
            call("munmap", room, begin - room)
        if rest := room + HUGE - begin:
            call("munmap", begin + self._size, rest)


def padded(size: int) -> int:
    """`size` in whole huge pages: that much of a file is mapped."""
    return -(-size // HUGE) * HUGE


def call(name: str, address: int | None, size: int, *more: object) -> int:
    """A function of the C library on a range of memory. Returns an address or 0. Raises OSError."""
    function = libc()[name]  # its own, whose types nobody else sets
    function.restype = ctypes.c_ssize_t
    found: int = function(ctypes.c_void_p(address), ctypes.c_size_t(size), *more)
    if found == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return found


def advise(address: int, size: int, advice: int) -> None:
    """Advice may be refused; then it is not followed."""
    libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)
