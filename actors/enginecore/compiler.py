"""Compiles grammars off the loop, so that a slow schema costs its sender time and nobody else a step."""

import logging
from weakref import WeakValueDictionary

from anyio import CapacityLimiter, create_task_group, sleep

from personae.actors.kit.actor import Actor
from personae.actors.kit.mailbox import Ref
from personae.actors.messages import Compile, Compiled, Message
from personae.actors.spec import GrammarService
from personae.errors import GrammarError, Overloaded, PersonaeError, RequestFailed
from personae.grammar.sandbox.masks import AnyGrammar
from personae.grammar.spec import GrammarKey

AT_ONCE = 4  # compiles of a tenant; more would only take the cores from the steps
SECONDS = 90.0  # that a request waits for its grammar

log = logging.getLogger(__name__)


class Compiler(Actor[Message]):
    """Answers `Compile` with `Compiled`. Each compile is a task of its own on a worker thread.

    Whatever a compile raises ends its own requests and nothing else: a grammar library that stumbles over
    somebody's schema must not take everybody's engine down. After `seconds` a request is answered without a
    grammar: its grammar is blamed if it has compiled for at least half of that time, else the queue is. The
    thread cannot be stopped and keeps its place among its tenant's `AT_ONCE`. Each tenant has `AT_ONCE` of
    its own. The cache keeps what a late compile brings for that tenant's next request.
    """

    def __init__(
        self, grammars: GrammarService, scheduler: Ref[Message], *, seconds: float = SECONDS
    ) -> None:
        self._grammars = grammars
        self._scheduler = scheduler
        self._seconds = seconds
        self._threads: WeakValueDictionary[str, CapacityLimiter] = (
            WeakValueDictionary()
        )  # while they are used
        self._begun: set[GrammarKey] = set()
        self._late: dict[GrammarKey, PersonaeError] = {}

    async def started(self) -> None:
        """Forget what was meant for an earlier epoch."""
        self.drain()

    async def receive(self, message: Message) -> None:
        """Answer from the cache, or start a compile."""
        if isinstance(message, Compile):
            spec, tenant = message.spec, message.tenant
            grammar = self._grammars.get(spec, tenant)
            if grammar is not None:
                self._scheduler.tell(Compiled(spec, tenant, grammar))
            elif (error := self._late.get((tenant, spec))) is not None:
                self._scheduler.tell(Compiled(spec, tenant, error=error))
            else:
                threads = self._threads.setdefault(tenant, CapacityLimiter(AT_ONCE))
                self.start_soon(self._compile, (tenant, spec), threads)

    async def _compile(self, key: GrammarKey, threads: CapacityLimiter) -> None:
        tenant, spec = key
        async with create_task_group() as tasks:
            tasks.start_soon(self._lose_patience, key)
            outcome = await self.in_thread(self._outcome, key, limiter=threads)
            tasks.cancel_scope.cancel()
        late = self._late.pop(key, None) is not None
        self._begun.discard(key)
        error = outcome if isinstance(outcome, PersonaeError) else None
        grammar = None if isinstance(outcome, PersonaeError) else outcome
        if not late:
            self._scheduler.tell(Compiled(spec, tenant, grammar, error))

    async def _lose_patience(self, key: GrammarKey) -> None:
        await sleep(self._seconds / 2)
        compiling = key in self._begun
        await sleep(self._seconds / 2)
        self._late[key] = error = self._lateness(compiling)
        tenant, spec = key
        self._scheduler.tell(Compiled(spec, tenant, error=error))

    def _lateness(self, compiling: bool) -> PersonaeError:
        """Why there is no grammar; `compiling`: for at least half of the time."""
        if compiling:
            why = f"The grammar could not be compiled within {self._seconds:g} seconds; make it simpler."
            return GrammarError(why, code="grammar_timeout")
        return Overloaded("Other grammars are being compiled; try again later.")

    def _outcome(self, key: GrammarKey) -> AnyGrammar | PersonaeError:
        tenant, spec = key
        self._begun.add(key)
        try:
            grammar = self._grammars.compile(spec, tenant)
            self._grammars.put(spec, grammar, tenant)  # here: a large one is counted member by member
        except PersonaeError as error:
            return error
        except BaseException:  # a panic in a Rust library is no Exception
            log.exception("a grammar of kind %s could not be compiled", spec.kind)
            return RequestFailed("The grammar could not be compiled.", code="grammar_failed")
        return grammar
