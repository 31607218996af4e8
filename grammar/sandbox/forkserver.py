"""A process that compiles each spec in a child of its own: what a spec costs there, it costs nobody else.

The fork server has read the vocabulary once, and keeps a few children standing by, each for one spec. The
kernel ends a child that takes too much processor time or memory, whatever library it is stuck in; all of it
is given back, and others that are compiled meanwhile notice nothing. What comes back is an `Outline` as soon
as it has been compiled once, and then a `Blueprint`, from which the grammar is made here without the analysis
and the searches: they are the part that can explode, and would hold our interpreter's lock.

A request travels on a socket of its own, whose other end is sent to whichever child takes it first. A child
says that it has taken one by closing its pipe to the server, which then forks the next. All end when we do.
"""

import gc
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from personae.errors import GrammarError, Overloaded
from personae.grammar.closing.blueprint import Blueprint, Outline
from personae.grammar.sandbox.server import Limits, Server, bound, received, say
from personae.grammar.sandbox.tour import TOUR, tour
from personae.grammar.schema.document import PARAMS, TOO_COMPLEX
from personae.grammar.spec import GrammarSpec
from personae.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from personae.grammar.compiler import GrammarCompiler

_COMMAND = "from personae.grammar.sandbox.forkserver import main; main()"
_STANDING = 2  # children that wait for a spec
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
    gc.disable()  # a child does not live that long, and its memory is limited
    gc.freeze()
    poll = select.poll()
    poll.register(control, 0)  # tells when the other end is closed
    standing: set[int] = set()
    learning: dict[int, bytes] = {}  # pipes of children that have taken a kind that is not known here
    while True:
        while len(standing) < _STANDING:
            pipe = _stand(compiler, control, limits, known)
            standing.add(pipe)
            poll.register(pipe, select.POLLIN)
        for pipe, _ in poll.poll():
            if pipe == control.fileno():
                os._exit(0)  # nothing is left to be put in order
            taken = os.read(pipe, 1)
            if taken and taken not in known:
                # It loads a library, and we do when it has ended: one at a time.
                standing.remove(pipe)
                learning[pipe] = taken
                continue
            poll.unregister(pipe)
            os.close(pipe)
            if pipe in learning:
                kind = learning.pop(pipe)
                known.add(kind)
                tour(compiler, _FIRST[kind])
                continue
            standing.remove(pipe)
            if not taken:
                time.sleep(0.1)  # it has died by itself, and the next may do so, too


def _stand(compiler: "GrammarCompiler", control: socket.socket, limits: Limits, known: set[bytes]) -> int:
    """Fork a child; the end of its pipe on which it tells what it has taken."""
    read, write = os.pipe()
    if os.fork():
        os.close(write)
        return read
    try:
        if not select.select([control], [], [], 0)[0]:
            tour(compiler, _FIRST[_NEARLY_ALL][:1])  # what it writes to, it has to copy: not while one waits
        kind, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        control.close()
        if kind:
            os.write(write, kind)
            if kind in known:
                os.close(write)
            else:
                tour(compiler, _FIRST[kind])
            bound(limits)
            with socket.socket(fileno=descriptors[0]) as connection:
                _answer(compiler, connection)
    finally:
        os._exit(0)


def _answer(compiler: "GrammarCompiler", connection: socket.socket) -> None:
    """A child's life."""
    spec, rewritten = msgspec.msgpack.decode(received(connection), type=tuple[GrammarSpec, bool])
    say(connection, b"")
    try:
        outcome: Blueprint | Refusal = compiler.draft(
            spec, rewritten=rewritten, tell=lambda outline: say(connection, msgspec.msgpack.encode(outline))
        )
    except GrammarError as error:
        outcome = Refusal(error.message, error.param, error.code)
    say(connection, msgspec.msgpack.encode(outcome))
