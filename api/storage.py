"""Handles a full disk: one error for everything that it prevents, and a reserve for what must work
regardless.

A full disk must not prevent revoking a key or deleting files. Both write a page or two of the database. So a
file of RESERVE_BYTES lies next to the database. It is released when such a write finds no room, and made
again, possibly smaller, as soon as there is room.
"""

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from personae.errors import StorageFailed

RESERVE_BYTES = 2**20
_LEAST = 2**15  # a smaller one is useless: opening the database takes as much

_FULL = {errno.ENOSPC, errno.EDQUOT}
_DISK = {*_FULL, errno.EIO, errno.EROFS, errno.EFBIG}
_SQLITE = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
}


class Reserve:
    """The file at `path`, which takes room until it is needed. Several threads or processes may use it: one
    that comes late finds it released already."""

    def __init__(self, path: Path, size: int = RESERVE_BYTES) -> None:
        self._path = path
        self._size = size

    def keep(self) -> None:
        """Make the reserve, or as much of it as the disk has room for."""
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return
        try:
            size = self._size
            while size > max(os.fstat(file).st_size, _LEAST):
                with suppress(OSError):
                    _allocate(file, size)
                size //= 2
        finally:
            os.close(file)

    def release(self) -> bool:
        """Release the room. False if there was none."""
        try:
            there = self._path.stat().st_size > 0
            os.truncate(self._path, 0)
        except OSError:
            return False
        return there


def storage_failure(error: BaseException) -> StorageFailed | None:
    """The error for a client if a disk, or the database on it, failed. None for any other error."""
    if isinstance(error, OSError) and error.errno in _DISK:
        full, reason = error.errno in _FULL, error.strerror
    elif isinstance(error, sqlite3.Error) and _primary(error) in _SQLITE:
        full, reason = _primary(error) == sqlite3.SQLITE_FULL, str(error)
    else:
        return None
    if full:
        return StorageFailed("The server's disk is full; delete something, or try again later.")
    return StorageFailed(f"The server's storage failed: {reason}. Try again later.")


@contextmanager
def storing() -> Iterator[None]:
    """Turns an error of the disk within the block into StorageFailed."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        if (failure := storage_failure(error)) is None:
            raise
        raise failure from error


def _primary(error: sqlite3.Error) -> int:
    """SQLite's result code without its details; 0 for an error of Python's module."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _allocate(file: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
        return
    os.lseek(file, 0, os.SEEK_SET)
    for _ in range(size // 2**16):
        os.write(file, bytes(2**16))
