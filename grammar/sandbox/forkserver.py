"""A process whose children compile specs, one at a time each, so that the cost of a spec affects nobody else.

The fork server has read the vocabulary once, and keeps a few children ready. The kernel ends a child that
takes too much processor time or memory, whatever library it is stuck in. Its resources are then free again,
and other compiles notice nothing. A child returns a `CompilePlan` as soon as it has compiled it, and then an
`Analysis`. From these the grammar is built here without the analysis and the searches, which are the part
that can explode and would hold this interpreter's lock.

Each request has a socket of its own, whose other end is sent to the first child that takes it. A child
reports on its line when it has taken a request, so that another child becomes ready in its place, and when it
has answered. It then waits again, unless enough others do or it has grown. A third of a compile's time in a
new child goes into pages that it shares with the server until it writes to them. All children end when this
process ends.
"""

import gc
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from personae.errors import GrammarError, NotEnforced, Overloaded
from personae.grammar.budget.analysis import Analysis, CompilePlan
from personae.grammar.sandbox.mask_server import Compiled, serve
from personae.grammar.sandbox.masks import RemoteGrammar
from personae.grammar.sandbox.server import (
    SandboxLimits,
    SandboxServer,
    bound,
    frames,
    request_of,
    resident,
    send_frame,
    unbound,
)
from personae.grammar.sandbox.warm_up import FIRST_SPECS, warm_up_specs
from personae.grammar.schema.document import PARAMS, TOO_COMPLEX
from personae.grammar.spec import GrammarSpec
from personae.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from personae.grammar.compiler import GrammarCompiler

_COMMAND = "from personae.grammar.sandbox.forkserver import main; main()"
_STANDING = 2  # children that wait for a spec, at least
_KEPT = 4  # children that have had a spec and are kept, at most
_AGAIN = b"."
_LOADED = b"+"
_TIMER = signal.SIGVTALRM
_LONG = bytes(
    [_TIMER]
)  # what the signal handler of a child writes then, in whatever library the child may be
# What a child must load first: one backend for nearly all specs, and another, large one for grammars in GBNF.
_NEARLY_ALL, _GBNF = b"n", b"g"
# The same in capitals: the child goes on and makes the masks.
_MASKS = {_NEARLY_ALL: b"N", _GBNF: b"G"}
_COMPILE_ORDINARY = 0.25  # seconds, as `SandboxLimits.ordinary`, of such a compile
_FIRST = {_NEARLY_ALL: FIRST_SPECS, _GBNF: (GrammarSpec("ebnf", 'root ::= "a"'),)}


class SandboxRefusal(msgspec.Struct, frozen=True, tag=True):
    """A GrammarError in transit."""

    message: str
    param: str | None
    code: str | None
    not_enforced: bool = False
    unexplained: bool = False

    @classmethod
    def of(cls, error: GrammarError) -> "SandboxRefusal":
        """To send the error."""
        if isinstance(error, NotEnforced):
            return cls(error.message, error.param, error.code, True, error.unexplained)
        return cls(error.message, error.param, error.code)

    def error(self) -> GrammarError:
        """The error that was sent."""
        if not self.not_enforced:
            return GrammarError(self.message, param=self.param, code=self.code)
        error = NotEnforced(self.message, param=self.param, code=self.code)
        error.unexplained = self.unexplained
        return error


# Built at import: msgspec reads a type when it is first decoded, and two threads that do so at once can
# crash.
_REPORTS: msgspec.msgpack.Decoder[CompilePlan | Analysis | SandboxRefusal] = msgspec.msgpack.Decoder(
    CompilePlan | Analysis | SandboxRefusal
)


# What to analyse, and whether rewritten; with a refusal, the spec whose refusal is to be explained.
_REQUESTS: msgspec.msgpack.Decoder[tuple[GrammarSpec, bool, SandboxRefusal | None]] = msgspec.msgpack.Decoder(
    tuple[GrammarSpec, bool, SandboxRefusal | None]
)
_SPECS = msgspec.msgpack.Decoder(GrammarSpec)
_STARTS: msgspec.msgpack.Decoder[Compiled | SandboxRefusal] = msgspec.msgpack.Decoder(
    Compiled | SandboxRefusal
)


class Sandbox(SandboxServer):
    """Compiles specs in the children. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary, limits: SandboxLimits | None = None) -> None:
        limits = limits or SandboxLimits()
        given = (vocabulary.tokens, vocabulary.stop_ids, dict(vocabulary.special), limits)
        super().__init__(_COMMAND, given, limits)

    def analyse(
        self,
        spec: GrammarSpec,
        *,
        rewritten: bool = True,
        report: Callable[[CompilePlan], None] | None = None,
    ) -> Analysis:
        """Analyse `spec`, with its schemas `rewritten` if necessary. Calls `report` with each plan that has
        been compiled; the last one is that of the result.

        Raises the GrammarError of the compile, a GrammarError of its own (`grammar_too_complex`) if the
        compile does not end within the limits, and Overloaded if this is not known in time.
        """
        request = msgspec.msgpack.encode((spec, rewritten, None))
        begun, asked = False, time.monotonic()
        try:
            for frame in self.ask(_GBNF if spec.kind == "ebnf" else _NEARLY_ALL, request):
                begun = True
                match _REPORTS.decode(frame) if frame else None:
                    case CompilePlan() as compile_plan:
                        if report is not None:
                            report(compile_plan)
                    case Analysis() as analysis:
                        return analysis
                    case SandboxRefusal() as refusal:
                        raise refusal.error()
        except OSError:  # a time-out is one of them
            begun = False
        if not begun or time.monotonic() - asked >= self.limits.wall:
            raise _overloaded()
        raise _too_complex(spec)

    def explain(self, spec: GrammarSpec, refusal: GrammarError) -> GrammarError:
        """The refusal of a schema that names all keywords that have to go; `refusal` itself if they are not
        found within the limits."""
        request = msgspec.msgpack.encode((spec, True, SandboxRefusal.of(refusal)))
        with suppress(OSError):
            for frame in self.ask(_NEARLY_ALL, request):
                if frame and isinstance(found := _REPORTS.decode(frame), SandboxRefusal):
                    return found.error()
        return refusal

    def masks(self, spec: GrammarSpec, left: Callable[[], None] = lambda: None) -> RemoteGrammar:
        """A process that has compiled `spec` and makes the masks of its answers. Calls `left` when the
        process is released. Raises as `analyse` does."""
        asked = time.monotonic()
        try:
            connection = self.connect(_MASKS[_GBNF if spec.kind == "ebnf" else _NEARLY_ALL])
        except OSError:
            raise _overloaded() from None
        try:
            send_frame(connection, msgspec.msgpack.encode(spec))
            report = next((_STARTS.decode(frame) for frame in frames(connection)), None)
        except OSError:
            connection.close()
            raise _overloaded() from None
        if isinstance(report, Compiled):
            return RemoteGrammar(connection, report.shortest, left)
        connection.close()
        if report is not None:
            raise report.error()
        if time.monotonic() - asked >= self.limits.wall:
            raise _overloaded()
        raise _too_complex(spec)


def _overloaded() -> Overloaded:
    return Overloaded("The grammar could not be compiled in time; try again later.")


def _too_complex(spec: GrammarSpec) -> GrammarError:
    return GrammarError(
        "The grammar cannot be compiled within the limits on time and memory; make it simpler.",
        param=PARAMS.get(spec.kind),
        code=TOO_COMPLEX,
    )


def main() -> None:
    """The server's main function: read the vocabulary, then keep children ready."""
    from personae.grammar.compiler import GrammarCompiler  # that module imports this one

    os.nice(5)
    control = socket.socket(fileno=int(sys.argv[1]))
    given = tuple[tuple[bytes, ...], tuple[int, ...], dict[str, int], SandboxLimits]
    tokens, stops, special, limits = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=given)
    compiler = GrammarCompiler(Vocabulary(tokens, stops, special), sandboxed=False)
    known = {_NEARLY_ALL}
    warm_up_specs(compiler, _FIRST[_NEARLY_ALL])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    gc.disable()  # a child collects between two specs
    gc.freeze()
    poll = select.poll()
    poll.register(control, 0)  # reports when the other end is closed
    children: dict[int, _Child] = {}  # by the descriptor of their line
    standing: set[int] = set()
    learning: dict[int, bytes] = {}  # for children that have taken a kind that is not loaded here
    while True:
        while len(standing) < _STANDING:
            child = _stand(compiler, control, limits, known, children.values())
            descriptor = child.line.fileno()
            children[descriptor] = child
            standing.add(descriptor)
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll():
            if descriptor == control.fileno():
                os._exit(0)  # there is nothing to clean up
            child = children[descriptor]
            said = b""
            with suppress(ConnectionError):  # it died before it read the message
                said = child.line.recv(1)
            if said == _LONG:
                child.give_way()
                continue
            if said == _AGAIN and not child.gives_way and len(standing) < _KEPT:
                standing.add(descriptor)
                with suppress(ConnectionError):
                    child.line.send(_AGAIN)
                continue
            if said == _LOADED:
                if (kind := learning.pop(descriptor, None)) is not None and kind not in known:
                    known.add(kind)
                    warm_up_specs(compiler, _FIRST[kind])
                continue
            if said not in (_AGAIN, b""):
                standing.remove(descriptor)
                if said.lower() not in known:
                    # The child loads a library, and this process does the same when the child has ended: one
                    # at a time.
                    learning[descriptor] = said.lower()
                continue
            poll.unregister(descriptor)
            children.pop(descriptor).line.close()
            if (kind := learning.pop(descriptor, None)) is not None:
                known.add(kind)
                warm_up_specs(compiler, _FIRST[kind])
            elif descriptor in standing:
                standing.remove(descriptor)
                time.sleep(0.1)  # it died by itself, and so may the next one


@dataclass(slots=True)
class _Child:
    """What the server knows of a child: this end of its line, and whether its spec takes long."""

    pid: int
    line: socket.socket
    gives_way: bool = False

    def give_way(self) -> None:
        """Let it run only when no other process wants to."""
        self.gives_way = True
        if sys.platform == "linux":
            with suppress(OSError):  # it has ended, or a container forbids this
                os.sched_setscheduler(self.pid, os.SCHED_IDLE, os.sched_param(0))


def _stand(
    compiler: "GrammarCompiler",
    control: socket.socket,
    limits: SandboxLimits,
    known: set[bytes],
    others: Iterable[_Child],
) -> _Child:
    """Fork a child."""
    line, theirs = socket.socketpair()
    if pid := os.fork():
        theirs.close()
        return _Child(pid, line)
    try:
        for ours in (line, *(other.line for other in others)):
            ours.close()  # a released child notices when the last copy is closed
        theirs.setblocking(False)
        signal.signal(_TIMER, lambda *_: None)
        signal.set_wakeup_fd(theirs.fileno())  # the signal is written here, whatever it interrupts
        if not select.select([control], [], [], 0)[0]:
            # a child must copy each page that it writes to, so do not write while it waits
            warm_up_specs(compiler, _FIRST[_NEARLY_ALL][:1])
        most = resident() + limits.size_estimate
        again = True
        while again:
            kind, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not kind:
                break  # the other end is closed
            theirs.send(kind)
            if kind.lower() not in known:
                warm_up_specs(compiler, _FIRST[kind.lower()])
            bound(limits)
            makes_masks = kind in _MASKS.values()
            signal.setitimer(signal.ITIMER_VIRTUAL, _COMPILE_ORDINARY if makes_masks else limits.ordinary)
            with socket.socket(fileno=descriptors[0]) as connection:
                if makes_masks:
                    theirs.send(_LOADED)
                    _make_masks(compiler, connection, limits)
                    break
                _answer(compiler, connection)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            unbound()
            gc.collect()
            again = kind in known and resident() <= most and _is_kept(theirs)
    finally:
        os._exit(0)


def _is_kept(line: socket.socket) -> bool:
    """Whether a child that has answered is kept for another request."""
    line.send(_AGAIN)
    select.select([line], [], [])
    return line.recv(1) == _AGAIN


def _make_masks(compiler: "GrammarCompiler", connection: socket.socket, limits: SandboxLimits) -> None:
    """A child's work for as long as its grammar is in use."""
    spec = _SPECS.decode(next(frames(connection)))
    try:
        grammar = compiler.compile_here(spec)
    except GrammarError as error:
        send_frame(connection, msgspec.msgpack.encode(SandboxRefusal.of(error)))
        return
    for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF, signal.ITIMER_VIRTUAL):
        signal.setitimer(timer, 0)
    serve(connection, grammar, compiler.vocabulary.size, limits)


def _answer(compiler: "GrammarCompiler", connection: socket.socket) -> None:
    """A child's work on one request."""
    spec, rewritten, refusal = _REQUESTS.decode(request_of(connection))
    send_frame(connection, b"")
    if refusal is not None:
        found = SandboxRefusal.of(compiler.explained(spec, refusal.error()))
        send_frame(connection, msgspec.msgpack.encode(found))
        return
    try:
        outcome: Analysis | SandboxRefusal = compiler.analyse(
            spec,
            rewritten=rewritten,
            report=lambda compile_plan: send_frame(connection, msgspec.msgpack.encode(compile_plan)),
        )
    except GrammarError as error:
        outcome = SandboxRefusal.of(error)
    send_frame(connection, msgspec.msgpack.encode(outcome))
