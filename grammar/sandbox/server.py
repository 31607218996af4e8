"""A process of our own whose children each answer one request, within limits that the kernel keeps."""

import os
import resource
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress
from threading import Lock

import msgspec

HEAD = 4  # bytes of the length before each frame


class SandboxLimits(msgspec.Struct, frozen=True):
    """Of one request: seconds of processor time, and bytes beside what the server has. Who asks waits up to
    `patience` seconds: the server may have to begin, and the machine be busy. A process that has gained more
    than `size_estimate` bytes is not asked again.

    Of an answer whose masks are made there: seconds of processor time that one mask may take, and all of
    them, and how long it may take on a busy machine. What takes more than `ordinary` gives way to all others.
    """

    processor: float = 5.0
    memory: int = 2**29
    patience: float = 75.0
    size_estimate: int = 2**26
    mask: float = 1.0
    masks: float = 10.0
    mask_wall: float = 20.0
    ordinary: float = 0.02

    @property
    def wall(self) -> float:
        """Seconds that a request may take on a busy machine: while somebody is there to be told."""
        return 0.8 * self.patience


class SandboxServer:
    """Started when it is first needed, or by `start`, and again when it has died. Thread-safe.

    `command` is the Python text that it runs: it has the descriptor of its end of a socket as its argument,
    on which the sockets of the requests come, and `given`, in MessagePack, on its standard input.
    """

    def __init__(self, command: str, given: object, limits: SandboxLimits) -> None:
        self._command = command
        self._given = given
        self.limits = limits
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Start the server, so that nobody has to wait for it; takes as long as a Python process takes."""
        with self._lock:
            self._running()

    def close(self) -> None:
        """End the server."""
        with self._lock:
            self._end()

    def ask(self, kind: bytes, request: bytes) -> Iterator[bytes]:
        """What a child says, one frame after the other; `kind` is a byte for whoever takes it.

        It ends early when the child is ended. Raises OSError when nothing comes in time.
        """
        with self.connect(kind) as ours:
            ours.sendall(request)
            ours.shutdown(socket.SHUT_WR)
            with ours.makefile("rb") as line:
                while len(head := line.read(HEAD)) == HEAD:
                    length = int.from_bytes(head, "big")
                    frame = line.read(length)
                    if len(frame) < length:
                        return  # it was ended
                    yield frame

    def connect(self, kind: bytes) -> socket.socket:
        """Our end of a line to a child. Raises OSError when there is none."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            try:
                socket.send_fds(self._running(), [kind], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        ours.settimeout(self.limits.patience)
        return ours

    def _running(self) -> socket.socket:
        """The way to the server, which is started if there is none."""
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._control is None:
            self._control, theirs = socket.socketpair()
            with theirs:
                self._process = _start(self._command, self._given, theirs)
            weakref.finalize(self, _stop, self._process, self._control)
        return self._control

    def _end(self) -> None:
        if self._process is not None and self._control is not None:
            _stop(self._process, self._control)
        self._process = self._control = None


def _start(command: str, given: object, theirs: socket.socket) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        # Or a Rust library that finds no memory looks for memory to say where, and waits for its own lock.
        "RUST_BACKTRACE": "0",
    }
    environment.pop("RUST_LIB_BACKTRACE", None)
    process = subprocess.Popen(  # noqa: S603 - our own interpreter and our own text
        [sys.executable, "-c", command, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # what a process says that runs out of memory helps nobody
        env=environment,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as line:
        line.write(msgspec.msgpack.encode(given))
    return process


def _stop(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()


def received(connection: socket.socket) -> bytes:
    """In a child: the request."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def frames(connection: socket.socket) -> Iterator[bytes]:
    """In a child that answers more than one request: each of them, until the other end is closed."""
    with connection.makefile("rb") as line:
        while len(head := line.read(HEAD)) == HEAD:
            yield line.read(int.from_bytes(head, "big"))


def say(connection: socket.socket, frame: bytes) -> None:
    """In a child: send a frame of the answer."""
    connection.sendall(len(frame).to_bytes(HEAD, "big") + frame)


def bound(limits: SandboxLimits) -> None:
    """Have the kernel end this process when it goes beyond its limits, or nobody waits any more."""
    for timer in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(timer, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limits.wall)
    signal.setitimer(signal.ITIMER_PROF, limits.processor)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if addressed := _pages(0):
        _limit_memory(addressed * resource.getpagesize() + limits.memory)


def unbound() -> None:
    """Take these limits back, for the next request."""
    for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0)
    _limit_memory(resource.getrlimit(resource.RLIMIT_AS)[1])


def resident() -> int:
    """Bytes of this process that are in memory; 0 where the system does not tell."""
    return _pages(1) * resource.getpagesize()


def _pages(column: int) -> int:
    with suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[column])
    return 0


def _limit_memory(most: int) -> None:
    with suppress(OSError, ValueError):  # not every system can limit the address space
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
