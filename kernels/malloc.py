"""The C library, and what its `malloc` keeps of freed memory."""

import ctypes
import sys
from functools import cache


def give_back_freed() -> None:
    """Return freed memory that malloc keeps to the system. Only glibc can do this."""
    if sys.platform == "linux" and (trim := getattr(libc(), "malloc_trim", None)) is not None:
        trim(0)


@cache
def libc() -> ctypes.CDLL:
    """The C library of this process."""
    return ctypes.CDLL(None, use_errno=True)
