"""A process of this program whose children answer requests, within limits that the kernel enforces.

`children.py` is that process's side. Here it is started, watched and replaced: when it has died, when it is
stopped, and when it has been silent for too long.
"""

import os
import resource
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress
from threading import Lock, Thread

import msgspec

HEAD = 4  # bytes; the length before each frame
BEAT_SECONDS = 0.25  # between two signs of life of the server
_STOPPED_BEATS = 4  # that did not come: the server is replaced if it is stopped
_SILENT_BEATS = 60  # the server is replaced in any case; one that only lacks processor time answers sooner
ATTEMPTS = 3  # of a request whose child was ended from outside
_SERVERS = 8  # that may die while a request waits
_END = 0xFFFF_FF00  # the head of the frame that says how a child's work has ended, in its last byte

# What the kernel does to a process that exceeds a limit: its library finds no memory, or its time is over.
# Every other signal comes from outside, or says that a busy machine had no time.
_EXCEEDED = frozenset({0, signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL})
ANSWERED = 0xFF  # in place of a signal


class ChildEnded(ConnectionError):
    """The child works on this request no longer: it has answered, or was ended by signal `number`, or by
    itself (0)."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by signal {number}")
        self.number = number

    @property
    def exceeded(self) -> bool:
        """Whether the request has exceeded its limits."""
        return self.number in _EXCEEDED


def end_frame(number: int) -> bytes:
    """The frame that says how a child's work has ended, as in `ChildEnded`."""
    return (_END | number).to_bytes(HEAD, "big")


def is_end(head: bytes) -> bool:
    """Whether this is the head of such a frame."""
    return int.from_bytes(head, "big") >= _END


def length_of(head: bytes) -> int:
    """The length of the frame after this head. Raises ChildEnded."""
    length = int.from_bytes(head, "big")
    if length >= _END:
        raise ChildEnded(length & 0xFF)
    return length


class SandboxLimits(msgspec.Struct, frozen=True):
    """The limits of one request: seconds of processor time, and bytes in addition to those of the server. A
    caller waits up to `patience` seconds, because the server may have to start, and the machine may be busy.

    For an answer whose masks are made there: the seconds of processor time that one mask may take, that all
    of them may take, and the time that a mask may take on a busy machine. An answer that is replayed may take
    as long as all of its masks. A grammar is kept for `kept` seconds after its last answer. Whatever takes
    more than `ordinary` runs only on idle cores, unless all that does gets less than `share` of a core.

    A process that has grown by more than `size_estimate` bytes gets no further request, and one that has had
    a request ends after `idle` seconds without another. While all together have grown by more than
    `memory_of_all` bytes, the largest is ended.
    """

    processor: float = 5.0
    memory: int = 2**29
    memory_of_all: int = 2**31
    patience: float = 75.0
    size_estimate: int = 2**26
    mask: float = 1.0
    masks: float = 10.0
    mask_wall: float = 20.0
    ordinary: float = 0.02
    share: float = 0.05
    idle: float = 5.0
    kept: float = 20.0

    @property
    def wall(self) -> float:
        """Seconds that a request may take on a busy machine, while its caller waits."""
        return 0.8 * self.patience

    @property
    def masks_wall(self) -> float:
        """Seconds that an answer may wait for its masks on a busy machine, all of them together."""
        return self.masks / self.mask * self.mask_wall


class Retries:
    """Decides whether a request is made again."""

    def __init__(self) -> None:
        self._children = self._servers = 0

    def again(self, error: OSError) -> bool:
        """Whether a request that has ended like this may succeed in another process."""
        if isinstance(error, ChildEnded):
            self._children += 1
            blameless = not error.exceeded and error.number != signal.SIGALRM
            return blameless and self._children < ATTEMPTS
        self._servers += 1
        return isinstance(error, ConnectionError) and self._servers < _SERVERS


class SandboxServer:
    """Started when it is first needed, or by `start`. A thread watches it, and starts another one within two
    seconds when it has died or is stopped. Thread-safe.

    `command` is the Python text that it runs. Its argument is the descriptor of its end of a socket, through
    which the sockets of the requests arrive and its signs of life come back. It gets `given`, in MessagePack,
    on its standard input.
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

        If the child is ended from outside, the request is made again, and the frames begin anew. Raises
        ChildEnded if the request exceeds its limits, or if its child was ended too often, and another OSError
        if nothing arrives in time.
        """
        retries = Retries()
        while True:
            try:
                with self.connect(kind) as ours:
                    ours.sendall(request)
                    ours.shutdown(socket.SHUT_WR)
                    yield from frames(ours)
                raise ConnectionResetError("the server has died")
            except OSError as error:
                if isinstance(error, ChildEnded) and error.number == ANSWERED:
                    return
                if not retries.again(error):
                    raise

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
            self._control.setblocking(False)  # a stopped server takes nothing, and is replaced soon
            with theirs:
                self._process = _start(self._command, self._given, theirs)
            weakref.finalize(self, _stop, self._process, self._control)
            watch = (weakref.ref(self), self._process, self._control.dup())
            Thread(target=_watch, args=watch, name="sandbox-watch", daemon=True).start()
        return self._control

    def replace(self, process: "subprocess.Popen[bytes]") -> None:
        """Start another server in place of this one, unless that has been done."""
        with self._lock:
            if self._process is process:
                self._end()
                self._running()

    def _end(self) -> None:
        if self._process is not None and self._control is not None:
            _stop(self._process, self._control)
        self._process = self._control = None


def _watch(
    server: "weakref.ref[SandboxServer]", process: "subprocess.Popen[bytes]", beats: socket.socket
) -> None:
    """Have the server replaced when it dies or is silent, if it has ever lived. `beats` is this thread's own
    descriptor of its signs of life."""
    lived, missing = False, 0  # beats are counted, as this process may have been stopped, too
    poll = select.poll()
    poll.register(beats, select.POLLIN)
    with beats:
        while True:
            if poll.poll(1000 * BEAT_SECONDS):
                with suppress(ConnectionError):
                    if beats.recv(4096):
                        lived, missing = True, 0
                        continue
                break  # it has died
            missing += 1
            if missing >= _STOPPED_BEATS and _is_stopped(process.pid):
                break
            if missing >= _SILENT_BEATS and lived:
                break
    if (found := server()) is not None and (lived or _is_stopped(process.pid)):
        found.replace(process)


def _is_stopped(pid: int) -> bool:
    """Whether a child process is stopped, as by SIGSTOP."""
    with suppress(OSError, AttributeError):  # it has ended and was waited for, or the system has no waitid
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


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
    """The frames that arrive, until the other end is closed. Raises ChildEnded where that arrives, and
    another ConnectionError if the other end is closed within a frame."""
    with connection.makefile("rb") as line:
        while head := line.read(HEAD):
            length = length_of(head)
            frame = line.read(length)
            if len(frame) < length:
                raise ConnectionResetError("the other end was closed within a frame")
            yield frame


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


def resident(process: int | str = "self") -> int:
    """Bytes of a process in memory, those that it shares included; 0 if the system does not report them."""
    return _pages(1, process) * resource.getpagesize()


def _pages(column: int, process: int | str = "self") -> int:
    with suppress(OSError), open(f"/proc/{process}/statm") as file:
        return int(file.read().split()[column])
    return 0


def _limit_memory(most: int) -> None:
    with suppress(OSError, ValueError):  # not every system can limit the address space
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
