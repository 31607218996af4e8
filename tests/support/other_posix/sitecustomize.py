"""Every Python process with this folder on its path finds a POSIX system that is not Linux.

Personae's own modules see another `sys.platform`; nothing has `memfd_create`, `pidfd_open`, `/proc`, control
groups, `prctl` and abstract sockets. Libraries still see Linux: they are built for it.
"""

import builtins
import ctypes
import importlib.machinery
import io
import mmap
import os
import signal
import socket
import sys
from types import CodeType
from typing import Any

LACKS = {
    os: (
        *("memfd_create", "pidfd_open", "sched_getaffinity", "sched_setaffinity", "sched_setscheduler"),
        *(
            "SCHED_IDLE",
            "posix_fallocate",
            "posix_fadvise",
            "eventfd",
            "preadv2",
            "O_TMPFILE",
            "copy_file_range",
        ),
    ),
    signal: ("pidfd_send_signal",),
    mmap: ("MAP_POPULATE",),
    socket: ("SO_PEERCRED",),
}
for module, names in LACKS.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


def without_linux(call: Any) -> Any:
    """A function that opens files, and finds no /proc and no /sys."""

    def opens(path: Any, *arguments: Any, **named: Any) -> Any:
        text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
        if isinstance(text, str) and text.startswith(("/proc", "/sys")):
            raise FileNotFoundError(2, "No such file or directory", text)
        return call(path, *arguments, **named)

    return opens


builtins.open = io.open = without_linux(io.open)
for name in ("open", "stat", "listdir", "scandir"):
    setattr(os, name, without_linux(getattr(os, name)))


class Library(ctypes.CDLL):
    """A C library without prctl."""

    def __getattr__(self, name: str) -> Any:
        if name == "prctl":
            raise AttributeError(name)
        return super().__getattr__(name)


class Socket(socket.socket):
    """A socket without abstract addresses."""

    def bind(self, address: Any) -> None:
        """Bind it, to anything but an abstract address."""
        if isinstance(address, str | bytes) and address[:1] in ("\0", b"\0"):
            raise FileNotFoundError(2, "No such file or directory")
        super().bind(address)


ctypes.CDLL = Library  # type: ignore[misc]  # a subclass of it
socket.socket = Socket  # type: ignore[misc]  # as above

get_code = importlib.machinery.SourceFileLoader.get_code


def own_code(loader: Any, name: str) -> CodeType | None:
    """The code of a module, which for Personae's own is on another platform."""
    if not name.startswith("personae"):
        return get_code(loader, name)
    path = loader.get_filename(name)
    code: CodeType = loader.source_to_code(
        loader.get_data(path).replace(b"sys.platform", b"'freebsd14'"), path
    )
    return code


importlib.machinery.SourceFileLoader.get_code = own_code  # type: ignore[method-assign]  # a loader of our own
assert sys.platform == "linux"
