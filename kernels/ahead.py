"""Memory that the system clears before a step writes it. Linux only: elsewhere nothing happens."""

import ctypes
import mmap
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from functools import cache

from torch import Tensor

from personae.kernels.cpu.build import library
from personae.kernels.mappable import HUGE

_LOWEST = 19  # niceness
# Before it, a page that is cleared keeps the whole process from mapping memory. A thread of low priority has
# taken more than a second for one where both cores were busy.
_LINUX = (6, 4)


class Ahead:
    """Memory for the pages that come next in `tensors`, each [pages, ...] on the CPU, on a thread of the
    lowest priority. A huge page that nobody has used takes the system milliseconds on a virtual machine, and
    the step that writes it first would wait.

    `pages`: so many are ready beyond those in use, but no more than a huge page holds of the largest part.
    The lowest free pages must be used first.
    """

    def __init__(self, tensors: Sequence[Tensor], pages: int) -> None:
        self._tensors = tensors
        self._pages = max(min(pages, HUGE // max(tensor[0].nbytes for tensor in tensors)), 1)
        self._end = 0  # the pages before it have memory or wait for it
        self._unmapped: set[int] = set()
        self._limit = self._size = len(tensors[0])  # no page from here on gets memory
        self._waiting: deque[range] = deque()
        self._runs = False
        self._lock = threading.Lock()  # of the last two

    def reach(self, page: int) -> None:
        """Pages up to this one are about to be used. Asks for more when half of what was ready is used."""
        if page + self._pages // 2 < self._end:
            return
        end = min(page + 1 + self._pages, self._limit)
        if end <= self._end or _library() is None:
            return
        with self._lock:
            self._waiting.append(range(self._end, end))
            starts, self._runs = not self._runs, True
        self._end = end
        if starts:
            threading.Thread(target=self._run, name="pages-ahead", daemon=True).start()

    def unmap(self, pages: Collection[int]) -> None:
        """These pages are about to lose their memory, and get none before `map`."""
        self._unmapped.update(pages)
        self._end = min((self._end, *pages))
        self._limit = min(self._unmapped, default=self._size)

    def map(self, pages: Collection[int]) -> None:
        """These pages are free again."""
        self._unmapped.difference_update(pages)
        self._limit = min(self._unmapped, default=self._size)

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        compiled = _library()
        assert compiled is not None
        while True:
            with self._lock:
                if not self._waiting:
                    self._runs = False
                    return
                pages = self._waiting.popleft()
            for tensor in self._tensors:
                for begin, end in self._pieces(tensor, pages):
                    compiled.personae_touch(
                        ctypes.c_void_p(begin), ctypes.c_int64(end - begin), ctypes.c_int64(mmap.PAGESIZE)
                    )

    def _pieces(self, tensor: Tensor, pages: range) -> Iterator[tuple[int, int]]:
        """The addresses of these pages, a huge page at a time, up to the first page that was unmapped."""
        first, stride = tensor.data_ptr(), tensor[0].nbytes
        begin = (first + pages.start * stride) // mmap.PAGESIZE * mmap.PAGESIZE
        while begin < (last := first + min(pages.stop, self._limit) * stride):
            end = min((begin // HUGE + 1) * HUGE, last)
            yield begin, end
            begin = end


@cache
def _library() -> ctypes.CDLL | None:
    """The compiled operators; None where a thread must not clear memory, or there are none."""
    if sys.platform != "linux" or _version(os.uname().release) < _LINUX:
        return None
    return library()


def _version(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", release)[:2])
