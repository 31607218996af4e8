"""The server's side of a KV cache that outlives the engine core: it holds the file (`engine/page_file.py`).

The memory is freed with the server, or when an engine core ended by anything but SIGKILL. After a fault of
its own, memory may be damaged. SIGKILL comes from outside: from the system, an operator, or this server when
the engine core hangs.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from personae.actors.process import CoreProcess, Launch
from personae.kernels.memory_file import nameless_file


@contextmanager
def held_page_file() -> Iterator["HeldPageFile"]:
    """A new page file for one engine core after the other."""
    file = nameless_file()
    try:
        yield HeldPageFile(file)
    finally:
        os.close(file)


class HeldPageFile:
    """An open page file. `path` is valid in all processes of this user."""

    def __init__(self, file: int) -> None:
        self._file = file
        self.path = Path(f"/proc/{os.getpid()}/fd/{file}")
        self._process: CoreProcess | None = None

    def launch(self, launch: Launch) -> Launch:
        """`launch`, for engine cores that use this file. Each starts after the one before has ended."""

        async def launched() -> CoreProcess:
            if self._process is not None and self._process.returncode != -signal.SIGKILL:
                os.ftruncate(self._file, 0)
            self._process = await launch()
            return self._process

        return launched
