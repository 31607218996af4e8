"""Compiles grammars off the loop, so that a slow schema delays only its sender and no step."""

import logging

from anyio import CancelScope, CapacityLimiter, Event, create_task_group, current_time, sleep

from personae.actors.enginecore.compile_turns import QUICK_SECONDS, CompileTurns, Turn
from personae.actors.kit.actor import Actor
from personae.actors.kit.mailbox import Ref
from personae.actors.messages import Compile, Compiled, Message
from personae.actors.spec import GrammarService
from personae.errors import GrammarError, Overloaded, PersonaeError, RequestFailed
from personae.grammar.matcher import Grammar
from personae.grammar.spec import GrammarKey

SECONDS = 90.0  # how long a request waits for its grammar
_THREADS = 32

log = logging.getLogger(__name__)


class Compiler(Actor[Message]):
    """Answers `Compile` with `Compiled`. Each compile is a task of its own, on a worker thread when it is its
    turn (`compile_turns.py`).

    An error in a compile ends its own requests and nothing else: a grammar library that fails on one client's
    schema must not take down the engine. After `seconds` a request is answered with an error. The error names
    the grammar if that has compiled for at least half of the time, else the queue. The thread cannot be
    stopped and keeps its place among its tenant's; the cache keeps the result of a late compile for that
    tenant's next request. A compile that has not begun by then is dropped.
    """

    def __init__(
        self, grammars: GrammarService, scheduler: Ref[Message], *, seconds: float = SECONDS
    ) -> None:
        self._grammars = grammars
        self._scheduler = scheduler
        self._seconds = seconds
        self._turns = CompileTurns()
        self._timed_out: dict[GrammarKey, PersonaeError] = {}

    async def started(self) -> None:
        """Drop messages of an earlier epoch."""
        self._threads = CapacityLimiter(_THREADS)
        self.drain()

    async def receive(self, message: Message) -> None:
        """Answer from the cache, or start a compile."""
        if isinstance(message, Compile):
            spec, tenant = message.spec, message.tenant
            grammar = self._grammars.get(spec, tenant)
            if grammar is not None:
                self._scheduler.tell(Compiled(spec, tenant, grammar))
            elif (error := self._timed_out.get((tenant, spec))) is not None:
                self._scheduler.tell(Compiled(spec, tenant, error=error))
            else:
                self.start_soon(self._compile, (tenant, spec))

    async def _compile(self, key: GrammarKey) -> None:
        tenant, spec = key
        outcome: Grammar | PersonaeError | None = None
        begun = Event()
        turn = Turn(tenant, begun.set)
        async with create_task_group() as tasks:
            tasks.start_soon(self._time_out, key, turn, tasks.cancel_scope)
            self._turns.wait(turn, current_time())
            try:
                await begun.wait()
                tasks.start_soon(self._lengthen, turn)
                outcome = await self.in_thread(self._outcome, key, limiter=self._threads)
            finally:
                self._turns.leave(turn, current_time())
            tasks.cancel_scope.cancel()
        late = self._timed_out.pop(key, None) is not None
        if not late:
            error = outcome if isinstance(outcome, PersonaeError) else None
            grammar = None if isinstance(outcome, PersonaeError) else outcome
            self._scheduler.tell(Compiled(spec, tenant, grammar, error))

    async def _lengthen(self, turn: Turn) -> None:
        await sleep(QUICK_SECONDS)
        self._turns.lengthen(turn, current_time())

    async def _time_out(self, key: GrammarKey, turn: Turn, compile: CancelScope) -> None:
        await sleep(self._seconds / 2)
        compiling = turn.begun is not None
        await sleep(self._seconds / 2)
        self._timed_out[key] = error = self._timeout_error(compiling)
        tenant, spec = key
        self._scheduler.tell(Compiled(spec, tenant, error=error))
        if turn.begun is None:
            compile.cancel()  # nobody waits for it

    def _timeout_error(self, compiling: bool) -> PersonaeError:
        """Return why there is no grammar. `compiling`: it compiled for at least half of the time."""
        if compiling:
            why = f"The grammar could not be compiled within {self._seconds:g} seconds; make it simpler."
            return GrammarError(why, code="grammar_timeout")
        return Overloaded("Other grammars are being compiled; try again later.")

    def _outcome(self, key: GrammarKey) -> Grammar | PersonaeError:
        tenant, spec = key
        try:
            grammar = self._grammars.compile(spec, tenant)
            self._grammars.put(spec, grammar, tenant)  # on this thread: measuring a large one takes long
        except PersonaeError as error:
            return error
        except BaseException:  # a panic in a Rust library is not an Exception
            log.exception("could not compile a grammar of kind %s", spec.kind)
            return RequestFailed("The grammar could not be compiled.", code="grammar_failed")
        return grammar
