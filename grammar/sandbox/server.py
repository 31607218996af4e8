"""A process of this program whose children each answer one request, within limits that the kernel
enforces."""

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

HEAD = 4  # bytes; the length before each frame


class SandboxLimits(msgspec.Struct, frozen=True):
    """The limits of one request: seconds of processor time, and bytes in addition to those of the server. A
    caller waits up to `patience` seconds, because the server may have to start, and the machine may be busy.
    A process that has grown by more than `size_estimate` bytes gets no further request.

    For an answer whose masks are made there: the seconds of processor time that one mask may take, that all
    of them may take, and the time that a mask may take on a busy machine. An answer that is replayed may take
    as long as all of its masks. Whatever takes more than `ordinary` runs only on idle cores.
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
        """Seconds that a request may take on a busy machine, while its caller waits."""
        return 0.8 * self.patience


class SandboxServer:
    """Started when it is first needed, or by `start`, and again when it has died. Thread-safe.

    `command` is the Python text that it runs. Its argument is the descriptor of its end of a socket, through
    which the sockets of the requests arrive. It gets `given`, in MessagePack, on its standard input.
    """

    def __init__(self, command: str, given: object, limits: SandboxLimits) -> None:
        self._command = command
        self._given = given
        self.limits = limits
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Start the server, so that no request has to wait for it. Takes as long as starting a Python
        process."""
        with self._lock:
            self._running()

    def close(self) -> None:
        """End the server."""
        with self._lock:
            self._end()

    def ask(self, kind: bytes, request: bytes) -> Iterator[bytes]:
        """The frames of a child's answer. `kind` is a byte for the child that takes the request.

        It ends early if the child is ended. Raises OSError if nothing arrives in time.
        """
        with self.connect(kind) as ours:
            ours.sendall(request)
            ours.shutdown(socket.SHUT_WR)
            with ours.makefile("rb") as line:
                while len(head := line.read(HEAD)) == HEAD:
                    length = int.from_bytes(head, "big")
                    frame = line.read(length)
                    if len(frame) < length:
                        return  # the child was ended
                    yield frame

    def connect(self, kind: bytes) -> socket.socket:
        """This end of a connection to a child. Raises OSError if there is no server."""
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
        """The socket to the server, which is started if it does not run."""
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
        # Otherwise a Rust library that finds no memory looks for memory to report that, and waits for its own
        # lock.
        "RUST_BACKTRACE": "0",
    }
    environment.pop("RUST_LIB_BACKTRACE", None)
    process = subprocess.Popen(  # noqa: S603 - this program's interpreter and text
        [sys.executable, "-c", command, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # the output of a process that runs out of memory helps nobody
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


def request_of(connection: socket.socket) -> bytes:
    """In a child: the request."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def frames(connection: socket.socket) -> Iterator[bytes]:
    """In a child that answers several requests: each of them, until the other end is closed."""
    with connection.makefile("rb") as line:
        while len(head := line.read(HEAD)) == HEAD:
            yield line.read(int.from_bytes(head, "big"))


def send_frame(connection: socket.socket, frame: bytes) -> None:
    """In a child: send a frame of the answer."""
    connection.sendall(len(frame).to_bytes(HEAD, "big") + frame)


def bound(limits: SandboxLimits) -> None:
    """Let the kernel end this process if it exceeds its limits, or if nobody waits any more."""
    for timer in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(timer, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limits.wall)
    signal.setitimer(signal.ITIMER_PROF, limits.processor)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if addressed := _pages(0):
        _limit_memory(addressed * resource.getpagesize() + limits.memory)


def unbound() -> None:
    """Remove these limits, for the next request."""
    for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0)
    _limit_memory(resource.getrlimit(resource.RLIMIT_AS)[1])


def resident() -> int:
    """Bytes of this process in memory; 0 if the system does not report them."""
    return _pages(1) * resource.getpagesize()


def _pages(column: int) -> int:
    with suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[column])
    return 0


def _limit_memory(most: int) -> None:
    with suppress(OSError, ValueError):  # not every system can limit the address space
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
