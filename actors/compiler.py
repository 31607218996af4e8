"""Compiles grammars off the loop, so that a slow schema costs its sender time and nobody else a step."""

import logging
from weakref import WeakValueDictionary

from anyio import CapacityLimiter, create_task_group, sleep

from personae.actors.kit.actor import Actor
from personae.actors.kit.mailbox import Ref
from personae.actors.messages import Compile, Compiled, Message
from personae.actors.script import Grammars
from personae.errors import GrammarError, Overloaded, PersonaeError, RequestFailed
from personae.grammar.backend import BoundGrammar
from personae.grammar.spec import GrammarSpec

AT_ONCE = 4  # compiles of a tenant; more would only take the cores from the steps
SECONDS = 90.0  # that a request waits for its grammar

log = logging.getLogger(__name__)


class Compiler(Actor[Message]):
    """Answers `Compile` with `Compiled`. Each compile is a task of its own on a worker thread.

    Whatever a compile raises ends its own requests and nothing else: a grammar library that stumbles over
    somebody's schema must not take everybody's engine down. One that takes more than `seconds` is answered
    without a grammar. Its thread cannot be stopped and keeps its place among its tenant's `AT_ONCE`, which
    are nobody else's; what it brings in the end is kept for the next who asks.
    """

    def __init__(self, grammars: Grammars, scheduler: Ref[Message], *, seconds: float = SECONDS) -> None:
        self._grammars = grammars
        self._scheduler = scheduler
        self._seconds = seconds
        self._threads: WeakValueDictionary[str, CapacityLimiter] = (
            WeakValueDictionary()
        )  # while they are used
        self._begun: set[GrammarSpec] = set()
        self._late: set[GrammarSpec] = set()

    async def started(self) -> None:
        """Forget what was meant for an earlier life."""
        self.drain()

    async def receive(self, message: Message) -> None:
        """Answer from the cache, or start a compile."""
        if isinstance(message, Compile):
            grammar = self._grammars.get(message.spec)
            if grammar is not None:
                self._scheduler.tell(Compiled(message.spec, grammar))
            elif message.spec in self._late:
                self._give_up(message.spec)
            else:
                threads = self._threads.setdefault(message.tenant, CapacityLimiter(AT_ONCE))
                self.start_soon(self._compile, message.spec, threads)

    async def _compile(self, spec: GrammarSpec, threads: CapacityLimiter) -> None:
        async with create_task_group() as tasks:
            tasks.start_soon(self._lose_patience, spec)
            outcome = await self.in_thread(self._outcome, spec, limiter=threads)
            tasks.cancel_scope.cancel()
        late = spec in self._late
        self._late.discard(spec)
        self._begun.discard(spec)
        error = outcome if isinstance(outcome, PersonaeError) else None
        grammar = None if isinstance(outcome, PersonaeError) else outcome
        if not late:
            self._scheduler.tell(Compiled(spec, grammar, error))

    async def _lose_patience(self, spec: GrammarSpec) -> None:
        await sleep(self._seconds)
        self._late.add(spec)
        self._give_up(spec)

    def _give_up(self, spec: GrammarSpec) -> None:
        error: PersonaeError
        if spec in self._begun:
            why = f"The grammar could not be compiled within {self._seconds:g} seconds; make it simpler."
            error = GrammarError(why, code="grammar_timeout")
        else:
            error = Overloaded("Other grammars are being compiled; try again later.")
        self._scheduler.tell(Compiled(spec, error=error))

    def _outcome(self, spec: GrammarSpec) -> BoundGrammar | PersonaeError:
        self._begun.add(spec)
        try:
            grammar = self._grammars.compile(spec)
            self._grammars.put(spec, grammar)  # here: a large one is counted member by member
        except PersonaeError as error:
            return error
        except BaseException:  # a panic in a Rust library is no Exception
            log.exception("a grammar of kind %s could not be compiled", spec.kind)
            return RequestFailed("The grammar could not be compiled.", code="grammar_failed")
        return grammar
