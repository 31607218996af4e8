"""A process that tries compiles, each in a child of its own: what a spec does there, it does to itself.

The house has read the vocabulary, and forks a child for every spec in a few milliseconds. The kernel ends a
child that takes too much processor time, too much real time or too much memory, whatever library it is stuck
in; all of it is given back, and others that are being tried notice nothing. What has compiled there compiles
here, too, at the same cost.

What is asked travels on a socket of its own, whose other end the house is sent; no answer on it means that
the child has died. The house ends when we do.
"""

import os
import resource
import signal
import socket
import subprocess
import sys
import weakref
from contextlib import suppress
from threading import Lock
from typing import Any

import msgspec

from personae.errors import GrammarError, Overloaded
from personae.grammar.schema.document import PARAMS
from personae.grammar.spec import GrammarKind, GrammarSpec
from personae.grammar.vocabulary import Vocabulary

_COMMAND = "from personae.grammar.trial.house import main; main()"
_GBNF, _OTHER = b"g", b"o"


class Refusal(msgspec.Struct, frozen=True):
    """A GrammarError on its way."""

    message: str
    param: str | None
    code: str | None


class Limits(msgspec.Struct, frozen=True):
    """Of one compile: seconds of processor time, real seconds, and bytes beside what the house has."""

    processor: float = 3.0
    seconds: float = 20.0
    memory: int = 2**30


class TrialHouse:
    """Started when it is first needed. Any number of threads may try specs at the same time, and each waits
    up to `patience` seconds for its answer: the house may have to begin first."""

    def __init__(
        self, vocabulary: Vocabulary, limits: Limits | None = None, *, patience: float = 60.0
    ) -> None:
        self._vocabulary = vocabulary
        self._patience = patience
        self._limits = limits or Limits()
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def admit(self, spec: GrammarSpec) -> None:
        """Return when `spec` has been compiled once, elsewhere.

        Raises the GrammarError that compiling it raises, one of its own (`grammar_too_complex`) when it does
        not end within the limits, and Overloaded when the house does not answer.
        """
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, self._lock:
                kind = _GBNF if spec.kind == "ebnf" else _OTHER
                socket.send_fds(self._running(), [kind], [theirs.fileno()])
            ours.settimeout(self._patience)
            try:
                ours.sendall(msgspec.json.encode(spec))
                ours.shutdown(socket.SHUT_WR)
                answer = _all(ours)
            except TimeoutError:
                raise Overloaded("The grammar could not be tried in time; try again later.") from None
            except OSError:
                answer = b""
        if not answer:
            raise GrammarError(
                "The grammar cannot be compiled within the limits on time and memory; make it simpler.",
                param=PARAMS.get(spec.kind),
                code="grammar_too_complex",
            )
        refusal = msgspec.json.decode(answer, type=Refusal | None)
        if refusal is not None:
            raise GrammarError(refusal.message, param=refusal.param, code=refusal.code)

    def close(self) -> None:
        """End the house."""
        with self._lock:
            self._end()

    def _running(self) -> socket.socket:
        """The way into the house, which is started if there is none."""
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._control is None:
            self._control, theirs = socket.socketpair()
            with theirs:
                self._process = _start(theirs, self._control, self._vocabulary, self._limits)
            weakref.finalize(self, _stop, self._process, self._control)
        return self._control

    def _end(self) -> None:
        if self._process is not None and self._control is not None:
            _stop(self._process, self._control)
        self._process = self._control = None


def _start(
    theirs: socket.socket, ours: socket.socket, vocabulary: Vocabulary, limits: Limits
) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(  # noqa: S603 - our own interpreter and our own text
        [sys.executable, "-c", _COMMAND, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # what a process says that runs out of memory helps nobody
        env=environment,
    )
    assert process.stdin is not None
    given = (vocabulary.tokens, vocabulary.stop_ids, dict(vocabulary.special), limits)
    with process.stdin as line, suppress(BrokenPipeError):
        line.write(msgspec.msgpack.encode(given))
    return process


def _stop(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()


def _all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def main() -> None:
    """The house: read the vocabulary, then fork a child for every socket that comes."""
    from personae.grammar.compiler import GrammarCompiler
    from personae.grammar.schema.canonical import canonicalise

    control = socket.socket(fileno=int(sys.argv[1]))
    given = tuple[tuple[bytes, ...], tuple[int, ...], dict[str, int], Limits]
    tokens, stops, special, limits = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=given)
    compiler = GrammarCompiler(Vocabulary(tokens, stops, special), canonicalise=canonicalise)
    _warm(compiler, "json_object", "")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the children
    warm = {_OTHER}
    while True:
        kind, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not kind:
            os._exit(0)  # nothing is left to be put in order
        if kind not in warm:
            _warm(compiler, "ebnf", 'root ::= "a"')
            warm.add(kind)
        if os.fork() == 0:
            control.close()
            _try(compiler, socket.socket(fileno=descriptors[0]), limits)
        os.close(descriptors[0])


def _warm(compiler: Any, kind: GrammarKind, source: str) -> None:
    """Read once what all children need."""
    compiler.compile(GrammarSpec(kind, source))


def _try(compiler: Any, connection: socket.socket, limits: Limits) -> None:
    """A child's life."""
    try:
        os.nice(5)
        _bound(limits)
        spec = msgspec.json.decode(_all(connection), type=GrammarSpec)
        refusal: Refusal | None = None
        try:
            compiler.compile(spec)
        except GrammarError as error:
            refusal = Refusal(error.message, error.param, error.code)
        connection.sendall(msgspec.json.encode(refusal))
    finally:
        os._exit(0)


def _bound(limits: Limits) -> None:
    """Have the kernel end this process when it goes beyond its limits."""
    for timer in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(timer, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limits.seconds)
    signal.setitimer(signal.ITIMER_PROF, limits.processor)
    with suppress(OSError, ValueError):  # not every system can tell, or limit, the address space
        with open("/proc/self/statm") as file:
            held = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + limits.memory, held + limits.memory))
