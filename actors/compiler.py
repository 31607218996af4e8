"""Compiles grammars off the loop, so that a slow schema costs its sender time and nobody else a step."""

import logging

from anyio import CapacityLimiter, to_thread

from personae.actors.kit.actor import Actor
from personae.actors.kit.mailbox import Ref
from personae.actors.messages import Compile, Compiled, Message
from personae.errors import GrammarError, PersonaeError, RequestFailed
from personae.grammar.closing.grammar import ClosingGrammar
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.spec import GrammarSpec

AT_ONCE = 4  # compiles; more would only take the cores from the steps

log = logging.getLogger(__name__)


class Compiler(Actor[Message]):
    """Answers `Compile` with `Compiled`. Each compile is a task of its own on a worker thread.

    Whatever a compile raises ends its own requests and nothing else: a grammar library that stumbles over
    somebody's schema must not take everybody's engine down.
    """

    def __init__(self, grammars: GrammarCompiler, scheduler: Ref[Message]) -> None:
        self._grammars = grammars
        self._scheduler = scheduler
        self._threads = CapacityLimiter(AT_ONCE)

    async def started(self) -> None:
        """Forget what was meant for an earlier life."""
        self.drain()

    async def receive(self, message: Message) -> None:
        """Answer from the cache, or start a compile."""
        if isinstance(message, Compile):
            grammar = self._grammars.get(message.spec)
            if grammar is not None:
                self._scheduler.tell(Compiled(message.spec, grammar))
            else:
                self.start_soon(self._compile, message)

    async def _compile(self, message: Compile) -> None:
        outcome = await to_thread.run_sync(self._outcome, message.spec, limiter=self._threads)
        if isinstance(outcome, PersonaeError):
            self._scheduler.tell(Compiled(message.spec, error=outcome))
        else:
            self._grammars.put(message.spec, outcome)
            self._scheduler.tell(Compiled(message.spec, outcome))

    def _outcome(self, spec: GrammarSpec) -> ClosingGrammar | PersonaeError:
        try:
            return self._grammars.compile(spec)
        except GrammarError as error:
            return error
        except BaseException:  # a panic in a Rust library is no Exception
            log.exception("a grammar of kind %s could not be compiled", spec.kind)
            return RequestFailed("The grammar could not be compiled.", code="grammar_failed")
