"""A process whose children compile specs, one at a time each, so that the cost of a spec affects nobody else.

The fork server has read the vocabulary and imported the libraries once (`children.py` keeps children of it
ready). The kernel ends a child that takes too much processor time or memory, whatever library it is stuck in.
Its resources are then free again, and other compiles notice nothing. A child returns a `CompilePlan` as soon
as it has compiled it, and then an `Analysis`. From these the grammar is built here without the analysis and
the searches, which are the part that can explode and would hold this interpreter's lock.

A third of a compile's time in a new child goes into pages that it shares with the server until it writes to
them, so a child compiles something before its first request.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from personae.errors import GrammarError, NotEnforced, Overloaded
from personae.grammar.budget.analysis import Analysis, CompilePlan
from personae.grammar.registry import missing
from personae.grammar.sandbox.children import Children
from personae.grammar.sandbox.light_import import import_xgrammar
from personae.grammar.sandbox.mask_server import GrammarReady, serve
from personae.grammar.sandbox.masks import RemoteGrammar
from personae.grammar.sandbox.server import (
    ChildEnded,
    Retries,
    SandboxLimits,
    SandboxServer,
    frames,
    request_of,
    send_frame,
)
from personae.grammar.sandbox.warm_up import FIRST_SPECS, warm_up_specs
from personae.grammar.schema.document import PARAMS, TOO_COMPLEX
from personae.grammar.schema.rewritten import as_written, rewritten
from personae.grammar.spec import GrammarSpec
from personae.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from personae.grammar.compiler import GrammarCompiler

_COMMAND = "from personae.grammar.sandbox.forkserver import main; main()"
_ANALYSIS, _MASKS = b"a", b"m"  # the kinds of requests
_COMPILE_ORDINARY = 0.25  # seconds, as `SandboxLimits.ordinary`, of a compile whose masks are made there, too
_GBNF = GrammarSpec("ebnf", 'root ::= "a"')


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
_STARTS: msgspec.msgpack.Decoder[GrammarReady | SandboxRefusal] = msgspec.msgpack.Decoder(
    GrammarReady | SandboxRefusal
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
        may_rewrite: bool = True,
        report: Callable[[CompilePlan], None] | None = None,
    ) -> Analysis:
        """Analyse `spec`. `may_rewrite`: its schemas may be brought into other forms. Calls `report` with
        each plan that has been compiled; the last one is that of the result.

        Raises the GrammarError of the compile, a GrammarError of its own (`grammar_too_complex`) if the
        compile does not end within the limits, and Overloaded if this is not known in time.
        """
        request = msgspec.msgpack.encode((spec, may_rewrite, None))
        asked = time.monotonic()
        try:
            for frame in self.ask(_ANALYSIS, request):
                match _REPORTS.decode(frame) if frame else None:
                    case CompilePlan() as compile_plan:
                        if report is not None:
                            report(compile_plan)
                    case Analysis() as analysis:
                        return analysis
                    case SandboxRefusal() as refusal:
                        raise refusal.error()
        except OSError as error:  # a time-out is one of them
            raise self._ended(spec, error, asked) from None
        raise _too_complex(spec)

    def explain(self, spec: GrammarSpec, refusal: GrammarError) -> GrammarError:
        """The refusal of a schema that names all keywords that have to go; `refusal` itself if they are not
        found within the limits."""
        request = msgspec.msgpack.encode((spec, True, SandboxRefusal.of(refusal)))
        with suppress(OSError):
            for frame in self.ask(_ANALYSIS, request):
                if frame and isinstance(found := _REPORTS.decode(frame), SandboxRefusal):
                    return found.error()
        return refusal

    def masks(self, spec: GrammarSpec, left: Callable[[], None] = lambda: None) -> RemoteGrammar:
        """A process that has compiled `spec` and makes the masks of its answers. Calls `left` when the
        process is released. Raises as `analyse` does."""
        connection, shortest = self._open_masks(spec)
        reopen = partial(self._open_masks, spec)
        return RemoteGrammar(connection, shortest, left, reopen, self.limits.masks_wall)

    def _open_masks(self, spec: GrammarSpec) -> tuple[socket.socket, int]:
        """The connection to such a process, and the tokens of the grammar's shortest answer."""
        asked = time.monotonic()
        retries = Retries()
        while True:
            try:
                connection = self.connect(_MASKS)
                try:
                    send_frame(connection, msgspec.msgpack.encode(spec))
                    report = next((_STARTS.decode(frame) for frame in frames(connection)), None)
                    if report is None:
                        raise ConnectionResetError("the server has died")
                except BaseException:
                    connection.close()
                    raise
            except OSError as error:
                if not retries.again(error):
                    raise self._ended(spec, error, asked) from None
                continue
            if isinstance(report, GrammarReady):
                return connection, report.shortest
            connection.close()
            raise report.error()

    def _ended(self, spec: GrammarSpec, error: OSError, asked: float) -> GrammarError | Overloaded:
        """Why there is no result. A grammar is to blame only if it has exceeded the limits itself."""
        exceeded = isinstance(error, ChildEnded) and error.exceeded
        if exceeded and time.monotonic() - asked < self.limits.wall:
            return _too_complex(spec)
        return _overloaded()


def _overloaded() -> Overloaded:
    return Overloaded("The grammar could not be compiled in time; try again later.")


def _too_complex(spec: GrammarSpec) -> GrammarError:
    return GrammarError(
        "The grammar cannot be compiled within the limits on time and memory; make it simpler.",
        param=PARAMS.get(spec.kind),
        code=TOO_COMPLEX,
    )


def main() -> None:
    """The server's main function: read the vocabulary, then serve requests."""
    from personae.grammar.compiler import GrammarCompiler  # that module imports this one

    control = socket.socket(fileno=int(sys.argv[1]))
    given = tuple[tuple[bytes, ...], tuple[int, ...], dict[str, int], SandboxLimits]
    tokens, stops, special, limits = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=given)
    compiler = GrammarCompiler(Vocabulary(tokens, stops, special), sandboxed=False)
    if missing("xgrammar") is None:
        import_xgrammar()
    warm_up_specs(compiler, (*FIRST_SPECS, _GBNF))

    def answer(kind: bytes, connection: socket.socket) -> None:
        if kind == _MASKS:
            _make_masks(compiler, connection, limits)
        else:
            _analyse(compiler, connection)

    os.nice(5)  # from here on: what waits for a server that has died waits for the start as well
    Children(
        control,
        limits,
        answer,
        lambda: warm_up_specs(compiler, (FIRST_SPECS[0], _GBNF)),
        lambda kind: _COMPILE_ORDINARY if kind == _MASKS else limits.ordinary,
    ).serve()


def _make_masks(compiler: "GrammarCompiler", connection: socket.socket, limits: SandboxLimits) -> None:
    """A child's work for as long as its grammar is in use."""
    request = next(frames(connection), None)
    if request is None:
        return
    try:
        grammar = compiler.compile_here(_SPECS.decode(request))
    except GrammarError as error:
        send_frame(connection, msgspec.msgpack.encode(SandboxRefusal.of(error)))
        return
    for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF, signal.ITIMER_VIRTUAL):
        signal.setitimer(timer, 0)
    serve(connection, grammar, compiler.vocabulary.size, limits)


def _analyse(compiler: "GrammarCompiler", connection: socket.socket) -> None:
    """A child's work on one request."""
    spec, may_rewrite, refusal = _REQUESTS.decode(request_of(connection))
    send_frame(connection, b"")
    if refusal is not None:
        found = SandboxRefusal.of(compiler.explained(spec, refusal.error()))
        send_frame(connection, msgspec.msgpack.encode(found))
        return
    try:
        outcome: Analysis | SandboxRefusal = compiler.analyse(
            spec,
            rewritings=rewritten if may_rewrite else as_written,
            report=lambda compile_plan: send_frame(connection, msgspec.msgpack.encode(compile_plan)),
        )
    except GrammarError as error:
        outcome = SandboxRefusal.of(error)
    send_frame(connection, msgspec.msgpack.encode(outcome))
