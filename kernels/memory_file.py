"""Files without a name: in memory on Linux, elsewhere in the folder of temporary files."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


def nameless_file(size: int = 0) -> int:
    """The descriptor of a new file of `size` zero bytes, which other processes can only inherit."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("personae")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, size)
    return file


def open_memory_file(data: bytes) -> int:
    """Create a file with this content, positioned at its beginning, and return its descriptor."""
    file = nameless_file()
    with os.fdopen(os.dup(file), "wb") as writer:
        writer.write(data)
    os.lseek(file, 0, os.SEEK_SET)
    return file


@contextmanager
def memory_file(data: bytes) -> Iterator[str]:
    """Yield a path, valid in this process, of a file with this content that only this user can read."""
    if not hasattr(os, "memfd_create"):  # /dev/fd shares one position among all who open it
        with tempfile.NamedTemporaryFile() as named:
            named.write(data)
            named.flush()
            yield named.name
        return
    file = open_memory_file(data)
    try:
        yield f"/proc/self/fd/{file}"
    finally:
        os.close(file)
