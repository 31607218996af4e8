"""How far a disk may be filled.

The last of it stays free for what must always be possible: deleting, and revoking a key. Whoever writes
something large asks first.
"""

import errno
import os
from pathlib import Path

KEPT_FREE = 4 * 2**20  # bytes


def check_free(folder: Path, size: int) -> None:
    """Raises OSError (ENOSPC) if `size` more bytes would leave less than KEPT_FREE on the folder's disk."""
    found = os.statvfs(folder)
    if found.f_blocks and found.f_bavail * found.f_frsize < size + KEPT_FREE:  # else it does not say
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def bytes_in(folder: Path) -> int:
    """Bytes of the files of a folder; 0 if it does not exist."""
    try:
        return sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file())
    except FileNotFoundError:
        return 0
