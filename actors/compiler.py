"""Compiles grammars off the loop, so that a slow schema costs its sender time and nobody else a step."""

from anyio import to_thread

from personae.actors.kit.actor import Actor
from personae.actors.kit.mailbox import Ref
from personae.actors.messages import Compile, Compiled, Message
from personae.errors import GrammarError
from personae.grammar.compiler import GrammarCompiler


class Compiler(Actor[Message]):
    """Answers `Compile` with `Compiled`. Each compile is a task of its own on a worker thread."""

    def __init__(self, grammars: GrammarCompiler, scheduler: Ref[Message]) -> None:
        self._grammars = grammars
        self._scheduler = scheduler

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
        try:
            grammar = await to_thread.run_sync(self._grammars.compile, message.spec)
        except GrammarError as error:
            self._scheduler.tell(Compiled(message.spec, error=error))
        else:
            self._grammars.put(message.spec, grammar)
            self._scheduler.tell(Compiled(message.spec, grammar))
