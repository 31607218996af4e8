"""Small actors for tests of the kit: they do what their messages say, and note what happens to them."""

from collections.abc import Awaitable, Callable, Container
from inspect import isawaitable
from typing import Any

import anyio

from personae.actors.kit.actor import Actor
from personae.actors.kit.child import Incident
from personae.actors.kit.mailbox import Ref, Reply
from personae.actors.kit.supervisor import Supervisor
from personae.actors.kit.thread import ThreadActor

Deed = Callable[[Any], object]  # called with the actor; may return something to await


class Boom(Exception):
    """The crash that tests plant."""


class Doer(Actor[Deed]):
    """Executes its messages. `name` and `diary`, if given, note each start and stop as `+name` and
    `-name`."""

    def __init__(self, name: str = "", diary: list[str] | None = None) -> None:
        self.name = name
        self.diary = diary if diary is not None else []

    async def started(self) -> None:
        self.diary.append(f"+{self.name}")

    async def receive(self, message: Deed) -> None:
        result = message(self)
        if isawaitable(result):
            await result

    async def stopped(self) -> None:
        self.diary.append(f"-{self.name}")


class Unwell(Doer):
    """Fails to start at those of its tries, counted from 1 over its restarts, that are in `ill`."""

    def __init__(
        self, tries: list[int], ill: Container[int], name: str = "", diary: list[str] | None = None
    ) -> None:
        super().__init__(name, diary)
        self.tries = tries
        self.ill = ill

    async def started(self) -> None:
        self.tries.append(len(self.tries) + 1)
        if self.tries[-1] in self.ill:
            raise Boom
        await super().started()


class ThreadDoer(ThreadActor[Deed]):
    """The same with a thread of its own."""

    def __init__(self, diary: list[str] | None = None) -> None:
        self.diary = diary if diary is not None else []

    def started(self) -> None:
        self.diary.append("+")

    def receive(self, message: Deed) -> None:
        message(self)

    def stopped(self) -> None:
        self.diary.append("-")


def crash(actor: object) -> None:
    """An action that crashes the actor."""
    raise Boom


def hang(actor: object) -> Awaitable[None]:
    """An action that only cancellation ends."""
    return anyio.sleep_forever()


def whoami(reply: Reply[object]) -> Deed:
    """An `ask` for the actor itself, to distinguish epochs."""
    return lambda actor: reply.tell(actor)


def note(diary: list[object], entry: object) -> Deed:
    """An action that is noted."""
    return lambda actor: diary.append(entry)


def quiet(incident: Incident) -> None:
    """A report hook for planned crashes."""


def family(top: Supervisor, diary: list[str], names: str = "abc") -> list[Ref[Deed]]:
    """The doers of one supervisor, which share a diary."""
    return [top.spawn(name, lambda name=name: Doer(name, diary)) for name in names]
