"""Files that are nowhere but in memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


def open_memory_file(data: bytes) -> int:
    """A file with this content, to be read from its beginning; returns its number."""
    file = os.memfd_create("personae")
    with os.fdopen(os.dup(file), "wb") as writer:
        writer.write(data)
    os.lseek(file, 0, os.SEEK_SET)
    return file


@contextmanager
def memory_file(data: bytes) -> Iterator[str]:
    """The path, for this process, of a file with this content."""
    file = open_memory_file(data)
    try:
        yield f"/proc/self/fd/{file}"
    finally:
        os.close(file)
