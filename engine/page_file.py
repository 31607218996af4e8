"""A KV cache in a file in memory that another process holds, so its pages outlive the engine.

The file begins with a header: what decides the content of a page, and where it lies. Then come marks of what
is on huge pages of the system, the ledger of the pages (`scheduling/page_ledger.py`), and the pages. An
engine that finds a file with its own header goes on with these pages. Any other file is emptied first.
Nothing is copied. Linux only.
"""

import hashlib
import logging
import mmap
import os
from pathlib import Path

from personae.engine.plan import MemoryLayout
from personae.engine.scheduling.page_ledger import PageLedger, ledger_bytes
from personae.kernels.file_memory import ALIGNED, FileMemory
from personae.kernels.mappable import HUGE, padded

_MAGIC = b"personaK1"
_HEADER_BYTES = mmap.PAGESIZE

_log = logging.getLogger("personae.engine")


class PageFile:
    """The open file at `path`, for pages of a layout and an `identity`. The tensors of a cache have
    `cache_bytes` together and number at most `tensors`. Raises OSError."""

    def __init__(
        self, path: Path, identity: str, layout: MemoryLayout, cache_bytes: int, tensors: int
    ) -> None:
        header = _MAGIC + hashlib.sha256(f"{identity}\n{layout.num_pages}\n{cache_bytes}".encode()).digest()
        self._size = padded(cache_bytes + tensors * ALIGNED)
        ledger = _HEADER_BYTES + -(-self._size // HUGE // mmap.PAGESIZE) * mmap.PAGESIZE
        self._offset = padded(ledger + ledger_bytes(layout.num_pages, layout.page_size))
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        whole = self._offset + self._size
        if os.fstat(self._file).st_size != whole or os.pread(self._file, len(header), 0) != header:
            os.ftruncate(self._file, 0)
            os.ftruncate(self._file, whole)
            os.pwrite(self._file, header, 0)
        facts = memoryview(mmap.mmap(self._file, self._offset))
        self._huge = facts[_HEADER_BYTES:ledger]
        self.ledger = PageLedger(
            facts[ledger:],
            layout.num_pages,
            layout.page_size,
            partial=not layout.whole,
        )

    def memory(self) -> FileMemory:
        """The memory of the pages, for the tensors of one cache."""
        return FileMemory(self._file, self._offset, self._size, self._huge)


def open_page_file(
    path: Path, identity: str, layout: MemoryLayout, cache_bytes: int, tensors: int
) -> PageFile | None:
    """The page file at `path`; None, with a warning, if it cannot be used."""
    try:
        return PageFile(path, identity, layout, cache_bytes, tensors)
    except OSError as error:
        _log.warning("the KV cache ends with this engine: %s", error)
        return None
