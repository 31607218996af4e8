"""Builds the compiler of grammars while other things go on.

It reads the tokenizer and the vocabulary, and takes a processor half a second, in which it often has the
interpreter's lock. So it begins when a grammar is asked for, or else as soon as the process is idle: the
start and the requests that waited for it come first.
"""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Event, Thread
from time import monotonic, process_time
from typing import TYPE_CHECKING

from personae.actors.spec import GrammarService
from personae.grammar.matcher import Grammar
from personae.grammar.spec import GrammarSpec
from personae.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from personae.grammar.compiler import GrammarCompiler


PATIENCE_SECONDS = 0.3  # a process that has hardly computed for so long is idle
IDLE = 0.2  # of a processor
MOST_SECONDS = 20.0  # after which it begins in a process that is never idle, too


class CompilerBuilder:
    """Builds the compiler of grammars for each epoch of the engine core. `vocabulary` reads what it needs.
    `warm`: see `assemble`."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], warm: bool) -> None:
        self._vocabulary, self._warm = vocabulary, warm
        self._ahead: GrammarService | None = None

    def build_ahead(self) -> None:
        """Begin to build the compiler that the next call of `build` returns."""
        self._ahead = ahead = BegunCompiler(self._built)
        ahead.begin()

    def build(self) -> GrammarService:
        """Begin to build a compiler. Other requests need not wait until it is there."""
        ahead, self._ahead = self._ahead, None
        return BegunCompiler(self._built) if ahead is None else ahead

    def _built(self) -> "GrammarCompiler":
        from personae.grammar.compiler import GrammarCompiler  # 0.2 s, which a start need not wait for

        compiler = GrammarCompiler(self._vocabulary())
        if self._warm:
            compiler.warm_up()
        return compiler


class BegunCompiler:
    """Implements `GrammarService` by a compiler that a thread of its own builds."""

    def __init__(self, build: "Callable[[], GrammarCompiler]") -> None:
        self._compiler: Future[GrammarCompiler] = Future()
        self._wanted = Event()
        Thread(target=self._run, args=(build,), name="grammars", daemon=True).start()

    def _run(self, build: "Callable[[], GrammarCompiler]") -> None:
        self._wait()
        try:
            self._compiler.set_result(build())
        except BaseException as error:  # raised where a grammar is needed
            self._compiler.set_exception(error)

    def _wait(self) -> None:
        """Until it is wanted, or the process is idle."""
        latest, used = monotonic() + MOST_SECONDS, process_time()
        while not self._wanted.wait(PATIENCE_SECONDS) and monotonic() < latest:
            before, used = used, process_time()
            if used - before < IDLE * PATIENCE_SECONDS:
                return

    def begin(self) -> None:
        """Something will need it."""
        self._wanted.set()

    def get(self, spec: GrammarSpec, tenant: str) -> Grammar | None:
        """See `GrammarService`."""
        there = self._compiler.done() and self._compiler.exception() is None
        return self._compiler.result().get(spec, tenant) if there else None

    def compile(self, spec: GrammarSpec, tenant: str) -> Grammar:
        """See `GrammarService`."""
        self.begin()
        return self._compiler.result().compile(spec, tenant)

    def put(self, spec: GrammarSpec, grammar: Grammar, tenant: str) -> None:
        """See `GrammarService`."""
        self._compiler.result().put(spec, grammar, tenant)

    def close(self) -> None:
        """End the compiler's processes."""
        self._compiler.result().close()
