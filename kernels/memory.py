"""Large tensors that live long."""

import ctypes
import mmap
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from math import prod

import torch
from torch import Tensor

_UNRESERVED = 0x4000  # MAP_NORESERVE, which Python's mmap may not know: much of what is mapped stays empty


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


def give_back(part: Tensor) -> None:
    """Let the system have the memory of a contiguous part of `zeros` back: whole pages of the system in it.

    What was there is lost. Whoever writes there again takes memory anew. Elsewhere than on the CPU and Linux
    nothing happens.
    """
    if part.device.type != "cpu" or sys.platform != "linux":
        return
    begin = -(-part.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (part.data_ptr() + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        # May fail where memory is locked; then it is not given back.
        _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def giving_back_pages(pages: Tensor, ids: Iterable[int]) -> Iterator[None]:
    """`give_back` of pages[id] for each of them, neighbours in one go, each of which is a piece: a place on
    a huge page takes the system some 20 us."""
    run: list[int] = []
    for id in sorted(ids):
        if run and id != run[-1] + 1:
            give_back(pages[run[0] : run[-1] + 1])
            yield
            run = []
        run.append(id)
    if run:
        give_back(pages[run[0] : run[-1] + 1])
        yield


def give_back_pages(pages: Tensor, ids: Iterable[int]) -> None:
    """`giving_back_pages`, all at once."""
    for _ in giving_back_pages(pages, ids):
        pass


def give_back_freed() -> None:
    """Let the system have what was freed between things that stay, which malloc keeps; glibc alone can."""
    if sys.platform == "linux" and (trim := getattr(_libc(), "malloc_trim", None)) is not None:
        trim(0)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
