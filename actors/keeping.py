"""Engine cores that outlive a frontend that was killed, and the next frontend that takes them over.

An engine core listens on a socket in the frontend's data folder. While a frontend is connected it accepts
nothing there. When the connection closes, it drops all sequences, keeps the weights, and waits for a new
frontend for some seconds (`actors/enginecore/kept.py`). The next frontend with the same data folder asks each
of them:

    frontend    the ticket, 32 bytes
    engine      its fingerprint, 32 bytes; it closes the connection if the ticket is wrong
    frontend    TAKE with two open files, for its output and for its step recorder; or END

After TAKE the connection is the line between the two, as if the frontend had just started the process. The
fingerprint stands for everything that a process loads: the version of Personae, the options, the environment,
and the files of the model and the adapters. An engine core with another one is of no use, so it is ended.
"""

import hashlib
import hmac
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
from anyio import to_thread
from anyio.abc import ByteReceiveStream, ByteStream, SocketStream

import personae
from personae.actors.enginecore.step_recorder import LastStep, StepRecorder
from personae.actors.framing import encode
from personae.actors.options import EngineOptions
from personae.actors.process import ChildProcess, CoreProcess, Launch
from personae.actors.spawn import end_ahead
from personae.actors.wire import Keep
from personae.engine.numerics import weights_digest

TICKET_BYTES = 32
FINGERPRINT_BYTES = 32
TAKE, END = b"T", b"E"
SUFFIX = ".sock"
ANSWER_SECONDS = 30.0  # for an engine core to finish its step, drop everything and answer
UNKNOWN_EXIT_CODE = 255  # only its parent learns a process's exit code, and its parent was killed

# the beginnings of variables that an engine core's numbers and speed may depend on
_ENVIRONMENT = (
    "CUDA",
    "DNNL",
    "GOMP",
    "HIP",
    "KMP",
    "LD_",
    "MKL",
    "NCCL",
    "OMP",
    "ONEDNN",
    "PERSONAE",
    "TORCH",
)
_SOURCES = (".py", ".cpp", ".h", ".so")

log = logging.getLogger("personae.engine")


class Keeper:
    """Has engine cores outlive this frontend for `seconds`. The next one needs the same folder and secret."""

    def __init__(self, folder: Path, secret: bytes, seconds: float) -> None:
        self.folder = folder
        self.seconds = seconds
        self.ticket = hmac.digest(secret, b"engines that outlive their frontend", hashlib.sha256)

    def keep(self, command: Sequence[str], environment: Mapping[str, str], options: EngineOptions) -> Keep:
        """Return what an engine core of these options needs. Reads parts of the model's files."""
        return Keep(self.seconds, self.folder, self.ticket, self._fingerprint(command, environment, options))

    def _fingerprint(
        self, command: Sequence[str], environment: Mapping[str, str], options: EngineOptions
    ) -> bytes:
        variables = {**os.environ, **environment}
        folders = [options.model, *options.adapters, *(place for _, place in options.named_adapters)]
        if options.draft_model is not None:
            folders.append(options.draft_model)
        parts = (
            personae.__version__,
            list(_files(Path(personae.__file__).parent, _SOURCES)),
            tuple(command),
            sorted((name, value) for name, value in variables.items() if name.startswith(_ENVIRONMENT)),
            replace(options, secret=None),
            weights_digest(options.model),
            [list(_files(folder)) for folder in folders],
        )
        return hmac.digest(self.ticket, encode(parts), hashlib.sha256)


def _files(root: Path, suffixes: tuple[str, ...] = ("",)) -> Iterator[tuple[str, int, int]]:
    """The path, the size and the time of the last change of each file below a folder, or of one file."""
    if root.is_file():
        status = root.stat()
        yield (str(root), status.st_size, status.st_mtime_ns)
    for folder, folders, names in os.walk(root, followlinks=True):
        folders.sort()
        for name in sorted(names):
            if name.endswith(suffixes):
                with suppress(OSError):  # a link to nothing
                    status = os.stat(os.path.join(folder, name))
                    yield (os.path.join(folder, name), status.st_size, status.st_mtime_ns)


@contextmanager
def short_path(folder: Path) -> Iterator[str]:
    """A short path of a folder: the name of a Unix socket may have 107 bytes."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{file}"
    finally:
        os.close(file)


class TakenOver:
    """An engine core's process that another frontend started. Implements `CoreProcess`."""

    line: ByteStream
    output: ByteReceiveStream

    def __init__(
        self, connection: socket.socket, output: socket.socket, pid: int, pidfd: int, keep: Keep | None
    ) -> None:
        self.pid = pid
        self.keep = keep
        self.recorder_file = -1  # it has the file already
        self.returncode: int | None = None
        self._recorder: StepRecorder
        self._connection = connection
        self._output = output
        self._pidfd = pidfd
        self._waiting = anyio.Lock()

    def take(self, theirs: socket.socket) -> None:
        """Send the files that it needs. Raises OSError if it has ended."""
        self._recorder, file = StepRecorder.create()
        try:
            socket.send_fds(self._connection, [TAKE], [theirs.fileno(), file])
        finally:
            os.close(file)

    async def open(self) -> None:
        """Open the connection and the output as streams."""
        self.line = await SocketStream.from_socket(self._connection)
        self.output = await SocketStream.from_socket(self._output)

    async def wait(self) -> int:
        """Wait for its end."""
        async with self._waiting:
            if self.returncode is None:
                await anyio.wait_readable(self._pidfd)
                os.close(self._pidfd)
                self.returncode = UNKNOWN_EXIT_CODE
        return self.returncode

    def kill(self) -> None:
        """End it at once."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """End it, and close the files of one that was never opened."""
        self.kill()
        self._connection.close()
        self._output.close()

    async def last_step(self) -> LastStep | None:
        """Return the last step that it began."""
        return self._recorder.read()


def take_over(folder: Path, ticket: bytes, wanted: Sequence[Keep]) -> list[TakenOver | None]:
    """Take over the engine cores that wait in a folder, one for each of `wanted` if there is one, and end the
    others. Blocks until all have answered, at most `ANSWER_SECONDS`."""
    found: list[TakenOver | None] = [None] * len(wanted)
    until = time.monotonic() + ANSWER_SECONDS
    with ExitStack() as stack:
        asked = []
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            if (connection := _connected(path)) is not None:
                stack.callback(connection.close)
                with suppress(OSError):
                    connection.sendall(ticket)
                    asked.append(connection)
        for connection in asked:
            place = _answered(connection, found, wanted, until)
            if place is None:
                continue
            pid, keep = _peer(connection), wanted[place]
            try:
                pidfd = os.pidfd_open(pid)
            except OSError:  # it has ended, or this system has none
                continue
            ours, theirs = socket.socketpair()
            with theirs:
                process = TakenOver(connection.dup(), ours, pid, pidfd, keep)
                try:
                    process.take(theirs)
                except OSError:
                    process.close()
                else:
                    found[place] = process
                    log.info("took over the engine with process id %d", pid)
    return found


def _connected(path: Path) -> socket.socket | None:
    """Connect to an engine core. None if there is no process behind this name any more."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        with short_path(path.parent) as short:
            connection.connect(f"{short}/{path.name}")
    except OSError:
        connection.close()
        path.unlink(missing_ok=True)
        return None
    return connection


def _answered(
    connection: socket.socket, found: Sequence[TakenOver | None], wanted: Sequence[Keep], until: float
) -> int | None:
    """Return the place in `wanted` for this engine core, which waits for the order to take it. None if there
    is none: then it has been ended, unless it refused the ticket."""
    pid = _peer(connection)
    try:
        connection.settimeout(max(until - time.monotonic(), 0.01))
        fingerprint = connection.recv(FINGERPRINT_BYTES, socket.MSG_WAITALL)
        if not fingerprint:
            log.warning("the engine with process id %d did not accept this server's ticket", pid)
            return None
        for place, keep in enumerate(wanted):
            if found[place] is None and pid > 1 and hmac.compare_digest(keep.fingerprint, fingerprint):
                return place
        connection.sendall(END)
        _wait_for_end(pid)
        log.info("ended the engine with process id %d: it has other options or files, or is not needed", pid)
    except TimeoutError:
        log.warning("killed the engine with process id %d: it did not answer", pid)
        if pid > 1:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            _wait_for_end(pid)
    except OSError:
        pass  # it has ended
    return None


def _wait_for_end(pid: int) -> None:
    """Wait until a process has ended, so that its memory is free, but not for long."""
    try:
        file = os.pidfd_open(pid)
    except OSError:
        return  # it has ended
    try:
        select.select([file], [], [], ANSWER_SECONDS)
    finally:
        os.close(file)


def _peer(connection: socket.socket) -> int:
    """The process id of the process that listens; 0 if it is in another container."""
    size = 3 * 4
    return int.from_bytes(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)[:4], sys.byteorder
    )


@dataclass(slots=True)
class LocalLaunch:
    """Starts an engine core's process on this machine. The first time it is the one that was taken over."""

    command: Sequence[str]
    environment: Mapping[str, str]
    keep: Keep | None = None
    taken: TakenOver | None = None

    async def __call__(self) -> CoreProcess:
        """Return as soon as the process runs."""
        if (taken := self.taken) is not None:
            self.taken = None
            await taken.open()
            return taken
        return await ChildProcess.launch(self.command, self.environment, self.keep)


@asynccontextmanager
async def local_launches(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    options: EngineOptions,
    keeper: Keeper | None,
    count: int,
) -> AsyncIterator[list[Launch]]:
    """How to start an engine core's process in each of the environments. The first `count` are started now,
    so they take over engine cores that wait."""
    if keeper is None:
        yield [LocalLaunch(command, each) for each in environments]
        return

    def find() -> list[LocalLaunch]:
        keeper.folder.mkdir(mode=0o700, exist_ok=True)
        keeps: list[Keep | None] = [None] * len(environments)
        if keeper.seconds:
            with suppress(OSError):  # a file that cannot be read: the engine core says so
                keeps = [keeper.keep(command, each, options) for each in environments]
        wanted = [keep for keep in keeps[:count] if keep is not None]
        found = [*take_over(keeper.folder, keeper.ticket, wanted), *[None] * len(environments)]
        return [LocalLaunch(command, *each) for each in zip(environments, keeps, found, strict=False)]

    launches = await to_thread.run_sync(find)
    if all(launch.taken is not None for launch in launches[:count]):
        end_ahead()
    try:
        yield list(launches)
    finally:
        for launch in launches:
            if launch.taken is not None:
                launch.taken.close()
