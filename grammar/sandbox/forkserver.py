"""A process whose children compile specs, one at a time each: what a spec costs there, it costs nobody else.

The fork server has read the vocabulary once, and keeps a few children standing by. The kernel ends a child
that takes too much processor time or memory, whatever library it is stuck in; all of it is given back, and
others that are compiled meanwhile notice nothing. What comes back is an `Outline` as soon as it has been
compiled once, and then a `Blueprint`, from which the grammar is made here without the analysis and the
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
from typing import TYPE_CHECKING

import msgspec

from personae.errors import GrammarError, Overloaded
from personae.grammar.closing.blueprint import Blueprint, Outline
from personae.grammar.sandbox.server import Limits, Server, bound, received, resident, say, unbound
from personae.grammar.sandbox.tour import TOUR, tour
from personae.grammar.schema.document import PARAMS, TOO_COMPLEX
from personae.grammar.spec import GrammarSpec
from personae.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from personae.grammar.compiler import GrammarCompiler

_COMMAND = "from personae.grammar.sandbox.forkserver import main; main()"
_STANDING = 2  # children that wait for a spec, at least
_KEPT = 4  # of those that have had one, at most
_AGAIN = b"."
# What a child needs to be read first: nearly all the one backend, grammars in GBNF the other, which is large.
_NEARLY_ALL, _GBNF = b"n", b"g"
_FIRST = {_NEARLY_ALL: TOUR, _GBNF: (GrammarSpec("ebnf", 'root ::= "a"'),)}


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """A GrammarError on its way."""

    message: str
    param: str | None
    code: str | None


# Made here: msgspec reads a type when it is first decoded, and two threads that do so at once can crash.
_REPORTS: msgspec.msgpack.Decoder[Outline | Blueprint | Refusal] = msgspec.msgpack.Decoder(
    Outline | Blueprint | Refusal
)


class Sandbox(Server):
    """Compiles there; thread-safe."""

    def __init__(self, vocabulary: Vocabulary, limits: Limits | None = None) -> None:
        limits = limits or Limits()
        given = (vocabulary.tokens, vocabulary.stop_ids, dict(vocabulary.special), limits)
        super().__init__(_COMMAND, given, limits)

    def draft(
        self, spec: GrammarSpec, *, rewritten: bool = True, tell: Callable[[Outline], None] | None = None
    ) -> Blueprint:
        """What compiling `spec` comes to, its schemas `rewritten` where that is needed. `tell` hears of each
        outline that has been compiled, the last that of the blueprint.

        Raises the GrammarError that compiling it raises, one of its own (`grammar_too_complex`) when it does
        not end within the limits, and Overloaded when it is not known in time whether it does.
        """
        request = msgspec.msgpack.encode((spec, rewritten))
        begun = False
        try:
            for frame in self.ask(_GBNF if spec.kind == "ebnf" else _NEARLY_ALL, request):
                begun = True
                match _REPORTS.decode(frame) if frame else None:
                    case Outline() as outline:
                        if tell is not None:
                            tell(outline)
                    case Blueprint() as blueprint:
                        return blueprint
                    case Refusal(message=message, param=param, code=code):
                        raise GrammarError(message, param=param, code=code)
        except OSError:  # the time-out among them
            begun = False
        if not begun:
            raise Overloaded("The grammar could not be compiled in time; try again later.")
        raise GrammarError(
            "The grammar cannot be compiled within the limits on time and memory; make it simpler.",
            param=PARAMS.get(spec.kind),
            code=TOO_COMPLEX,
        )


def main() -> None:
    """The server: read the vocabulary, then see to it that children stand by."""
    from personae.grammar.compiler import GrammarCompiler  # it knows of us

    os.nice(5)
    control = socket.socket(fileno=int(sys.argv[1]))
    given = tuple[tuple[bytes, ...], tuple[int, ...], dict[str, int], Limits]
    tokens, stops, special, limits = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=given)
    compiler = GrammarCompiler(Vocabulary(tokens, stops, special), sandboxed=False)
    known = {_NEARLY_ALL}
    tour(compiler, _FIRST[_NEARLY_ALL])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the children
    gc.disable()  # a child collects between two specs
    gc.freeze()
    poll = select.poll()
    poll.register(control, 0)  # tells when the other end is closed
    lines: dict[int, socket.socket] = {}  # to the children
    standing: set[int] = set()
    learning: dict[int, bytes] = {}  # to children that have taken a kind that is not known here
    while True:
        while len(standing) < _STANDING:
            line = _stand(compiler, control, limits, known, lines.values())
            lines[line.fileno()] = line
            standing.add(line.fileno())
            poll.register(line, select.POLLIN)
        for descriptor, _ in poll.poll():
            if descriptor == control.fileno():
                os._exit(0)  # nothing is left to be put in order
            line = lines[descriptor]
            said = b""
            with suppress(ConnectionError):  # it has died before it read what it was told
                said = line.recv(1)
            if said == _AGAIN and len(standing) < _KEPT:
                standing.add(descriptor)
                with suppress(ConnectionError):
                    line.send(_AGAIN)
                continue
            if said not in (_AGAIN, b""):
                standing.remove(descriptor)
                if said not in known:
                    # It loads a library, and we do when it has ended: one at a time.
                    learning[descriptor] = said
                continue
            poll.unregister(line)
            lines.pop(descriptor).close()
            if (kind := learning.pop(descriptor, None)) is not None:
                known.add(kind)
                tour(compiler, _FIRST[kind])
            elif descriptor in standing:
                standing.remove(descriptor)
                time.sleep(0.1)  # it has died by itself, and the next may do so, too


def _stand(
    compiler: "GrammarCompiler",
    control: socket.socket,
    limits: Limits,
    known: set[bytes],
    lines: Iterable[socket.socket],
) -> socket.socket:
    """Fork a child; our end of its line. `lines` are those to the others."""
    line, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        return line
    try:
        for ours in (line, *lines):  # who is let go sees it when the last copy is closed
            ours.close()
        if not select.select([control], [], [], 0)[0]:
            tour(compiler, _FIRST[_NEARLY_ALL][:1])  # what it writes to, it has to copy: not while one waits
        most = resident() + limits.growth
        again = True
        while again:
            kind, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not kind:
                break  # the other end is closed
            theirs.send(kind)
            if kind not in known:
                tour(compiler, _FIRST[kind])
            bound(limits)
            with socket.socket(fileno=descriptors[0]) as connection:
                _answer(compiler, connection)
            unbound()
            gc.collect()
            again = (
                kind in known and resident() <= most and theirs.send(_AGAIN) > 0 and theirs.recv(1) == _AGAIN
            )
    finally:
        os._exit(0)


def _answer(compiler: "GrammarCompiler", connection: socket.socket) -> None:
    """What a child is for."""
    spec, rewritten = msgspec.msgpack.decode(received(connection), type=tuple[GrammarSpec, bool])
    say(connection, b"")
    try:
        outcome: Blueprint | Refusal = compiler.draft(
            spec, rewritten=rewritten, tell=lambda outline: say(connection, msgspec.msgpack.encode(outline))
        )
    except GrammarError as error:
        outcome = Refusal(error.message, error.param, error.code)
    say(connection, msgspec.msgpack.encode(outcome))
