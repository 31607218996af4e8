"""A process whose children compile specs, one at a time each: what a spec costs there, it costs nobody else.

The fork server has read the vocabulary once, and keeps a few children standing by. The kernel ends a child
that takes too much processor time or memory, whatever library it is stuck in; all of it is given back, and
others that are compiled meanwhile notice nothing. What comes back is an `CompilePlan` as soon as it has been
compiled once, and then a `Analysis`, from which the grammar is made here without the analysis and the
searches: they are the part that can explode, and would hold our interpreter's lock.

A request travels on a socket of its own, whose other end is sent to whichever child takes it first. A child
tells the server on its line when it has taken one, so that another stands by in its place, and when it has
answered: then it stands by again, unless enough do or it has grown. A third of the time of a compile in a new
child goes into pages that it has in common with the server until it writes to them. All end when we do.
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

from personae.errors import GrammarError, Overloaded
from personae.grammar.budget.analysis import Analysis, CompilePlan
from personae.grammar.sandbox.mask_server import Compiled, serve
from personae.grammar.sandbox.masks import RemoteGrammar
from personae.grammar.sandbox.server import (
    SandboxLimits,
    SandboxServer,
    bound,
    frames,
    received,
    resident,
    say,
    unbound,
)
from personae.grammar.sandbox.warm_up import TOUR, warm_up_specs
from personae.grammar.schema.document import PARAMS, TOO_COMPLEX
from personae.grammar.spec import GrammarSpec
from personae.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from personae.grammar.compiler import GrammarCompiler

_COMMAND = "from personae.grammar.sandbox.forkserver import main; main()"
_STANDING = 2  # children that wait for a spec, at least
_KEPT = 4  # of those that have had one, at most
_AGAIN = b"."
_LOADED = b"+"
_TIMER = signal.SIGVTALRM
_LONG = bytes(
    [_TIMER]
)  # what a child's signal writes when that is over, in whatever library the child may be
# What a child needs to be read first: nearly all the one backend, grammars in GBNF the other, which is large.
_NEARLY_ALL, _GBNF = b"n", b"g"
# The same in capitals: the child is to go on and make the masks.
_MASKS = {_NEARLY_ALL: b"N", _GBNF: b"G"}
_COMPILE_ORDINARY = 0.25  # seconds, of one that is not to give way for its masks before they take long
_FIRST = {_NEARLY_ALL: TOUR, _GBNF: (GrammarSpec("ebnf", 'root ::= "a"'),)}


class SandboxRefusal(msgspec.Struct, frozen=True, tag=True):
    """A GrammarError on its way."""

    message: str
    param: str | None
    code: str | None


# Made here: msgspec reads a type when it is first decoded, and two threads that do so at once can crash.
_REPORTS: msgspec.msgpack.Decoder[CompilePlan | Analysis | SandboxRefusal] = msgspec.msgpack.Decoder(
    CompilePlan | Analysis | SandboxRefusal
)


_SPECS = msgspec.msgpack.Decoder(GrammarSpec)
_STARTS: msgspec.msgpack.Decoder[Compiled | SandboxRefusal] = msgspec.msgpack.Decoder(
    Compiled | SandboxRefusal
)


class Sandbox(SandboxServer):
    """Compiles there; thread-safe."""

    def __init__(self, vocabulary: Vocabulary, limits: SandboxLimits | None = None) -> None:
        limits = limits or SandboxLimits()
        given = (vocabulary.tokens, vocabulary.stop_ids, dict(vocabulary.special), limits)
        super().__init__(_COMMAND, given, limits)

    def draft(
        self, spec: GrammarSpec, *, rewritten: bool = True, tell: Callable[[CompilePlan], None] | None = None
    ) -> Analysis:
        """What compiling `spec` comes to, its schemas `rewritten` where that is needed. `tell` hears of each
        outline that has been compiled, the last that of the blueprint.

        Raises the GrammarError that compiling it raises, one of its own (`grammar_too_complex`) when it does
        not end within the limits, and Overloaded when it is not known in time whether it does.
        """
        request = msgspec.msgpack.encode((spec, rewritten))
        begun, asked = False, time.monotonic()
        try:
            for frame in self.ask(_GBNF if spec.kind == "ebnf" else _NEARLY_ALL, request):
                begun = True
                match _REPORTS.decode(frame) if frame else None:
                    case CompilePlan() as compile_plan:
                        if tell is not None:
                            tell(compile_plan)
                    case Analysis() as analysis:
                        return analysis
                    case SandboxRefusal(message=message, param=param, code=code):
                        raise GrammarError(message, param=param, code=code)
        except OSError:  # the time-out among them
            begun = False
        if not begun or time.monotonic() - asked >= self.limits.wall:
            raise _overloaded()
        raise _too_complex(spec)

    def masks(self, spec: GrammarSpec, left: Callable[[], None] = lambda: None) -> RemoteGrammar:
        """A process that has compiled `spec` and makes the masks of its answers; `left` is called when it is
        let go. Raises as `draft` does."""
        asked = time.monotonic()
        try:
            connection = self.connect(_MASKS[_GBNF if spec.kind == "ebnf" else _NEARLY_ALL])
        except OSError:
            raise _overloaded() from None
        try:
            say(connection, msgspec.msgpack.encode(spec))
            report = next((_STARTS.decode(frame) for frame in frames(connection)), None)
        except OSError:
            connection.close()
            raise _overloaded() from None
        if isinstance(report, Compiled):
            return RemoteGrammar(connection, report.shortest, left)
        connection.close()
        if report is not None:
            raise GrammarError(report.message, param=report.param, code=report.code)
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
    """The server: read the vocabulary, then see to it that children stand by."""
    from personae.grammar.compiler import GrammarCompiler  # it knows of us

    os.nice(5)
    control = socket.socket(fileno=int(sys.argv[1]))
    given = tuple[tuple[bytes, ...], tuple[int, ...], dict[str, int], SandboxLimits]
    tokens, stops, special, limits = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=given)
    compiler = GrammarCompiler(Vocabulary(tokens, stops, special), sandboxed=False)
    known = {_NEARLY_ALL}
    warm_up_specs(compiler, _FIRST[_NEARLY_ALL])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the children
    gc.disable()  # a child collects between two specs
    gc.freeze()
    poll = select.poll()
    poll.register(control, 0)  # tells when the other end is closed
    children: dict[int, _Child] = {}  # by the descriptor of the line
    standing: set[int] = set()
    learning: dict[int, bytes] = {}  # to children that have taken a kind that is not known here
    while True:
        while len(standing) < _STANDING:
            child = _stand(compiler, control, limits, known, children.values())
            descriptor = child.line.fileno()
            children[descriptor] = child
            standing.add(descriptor)
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll():
            if descriptor == control.fileno():
                os._exit(0)  # nothing is left to be put in order
            child = children[descriptor]
            said = b""
            with suppress(ConnectionError):  # it has died before it read what it was told
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
                    # It loads a library, and we do when it has ended: one at a time.
                    learning[descriptor] = said.lower()
                continue
            poll.unregister(descriptor)
            children.pop(descriptor).line.close()
            if (kind := learning.pop(descriptor, None)) is not None:
                known.add(kind)
                warm_up_specs(compiler, _FIRST[kind])
            elif descriptor in standing:
                standing.remove(descriptor)
                time.sleep(0.1)  # it has died by itself, and the next may do so, too


@dataclass(slots=True)
class _Child:
    """What the server knows of one: our end of its line, and whether its spec takes long."""

    pid: int
    line: socket.socket
    gives_way: bool = False

    def give_way(self) -> None:
        """Have it run when nobody else wants to."""
        self.gives_way = True
        if sys.platform == "linux":
            with suppress(OSError):  # it has gone, or a container forbids that
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
            ours.close()  # who is let go sees it when the last copy is closed
        theirs.setblocking(False)
        signal.signal(_TIMER, lambda *_: None)
        signal.set_wakeup_fd(theirs.fileno())  # where the signal is written by whoever is interrupted
        if not select.select([control], [], [], 0)[0]:
            # what it writes to, it has to copy: not while one waits
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
    """In a child that has answered: whether it is to stand by again."""
    line.send(_AGAIN)
    select.select([line], [], [])
    return line.recv(1) == _AGAIN


def _make_masks(compiler: "GrammarCompiler", connection: socket.socket, limits: SandboxLimits) -> None:
    """What a child is for, for as long as its grammar is wanted."""
    spec = _SPECS.decode(next(frames(connection)))
    try:
        grammar = compiler.compile_here(spec)
    except GrammarError as error:
        say(connection, msgspec.msgpack.encode(SandboxRefusal(error.message, error.param, error.code)))
        return
    for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF, signal.ITIMER_VIRTUAL):
        signal.setitimer(timer, 0)
    serve(connection, grammar, compiler.vocabulary.size, limits)


def _answer(compiler: "GrammarCompiler", connection: socket.socket) -> None:
    """What a child is for."""
    spec, rewritten = msgspec.msgpack.decode(received(connection), type=tuple[GrammarSpec, bool])
    say(connection, b"")
    try:
        outcome: Analysis | SandboxRefusal = compiler.draft(
            spec,
            rewritten=rewritten,
            tell=lambda compile_plan: say(connection, msgspec.msgpack.encode(compile_plan)),
        )
    except GrammarError as error:
        outcome = SandboxRefusal(error.message, error.param, error.code)
    say(connection, msgspec.msgpack.encode(outcome))
