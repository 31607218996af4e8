"""How far a disk may be filled.

Some space stays free for operations that must always work: deleting, and revoking a key. Code that writes
something large checks first.
"""

import errno
import os
from pathlib import Path

KEPT_FREE = 4 * 2**20  # bytes


def check_free(folder: Path, size: int) -> None:
    """Raises OSError (ENOSPC) if `size` more bytes would leave less than KEPT_FREE on the folder's disk."""
    found = os.statvfs(folder)
    if found.f_blocks and found.f_bavail * found.f_frsize < size + KEPT_FREE:  # 0 blocks: unknown size
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def bytes_in(folder: Path) -> int:
    """Bytes of the files of a folder; 0 if it does not exist."""
    try:
        return sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file())
    except FileNotFoundError:
        return 0
