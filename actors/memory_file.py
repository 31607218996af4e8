"""Files that exist only in memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


def open_memory_file(data: bytes) -> int:
    """Create a file with this content, positioned at its beginning, and return its descriptor."""
    file = os.memfd_create("personae")
    with os.fdopen(os.dup(file), "wb") as writer:
        writer.write(data)
    os.lseek(file, 0, os.SEEK_SET)
    return file


@contextmanager
def memory_file(data: bytes) -> Iterator[str]:
    """Yield a path, valid in this process, of a file with this content."""
    file = open_memory_file(data)
    try:
        yield f"/proc/self/fd/{file}"
    finally:
        os.close(file)
