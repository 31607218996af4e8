"""Knows every adapter on the host and which of them must be on the device.

The executor's pool decides what fits and evicts; this actor keeps the line of those that did not fit yet. A
queue pins its adapter once, however many requests it holds.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping

from personae.actors.kit.actor import Actor
from personae.actors.kit.mailbox import Ref
from personae.actors.messages import Message, Pin, Pinned, Place, Placed, Release, Unpin
from personae.lora.adapter import Adapter


class AdapterStore(Actor[Message]):
    """Answers `Pin` with `Pinned` when the executor has placed the adapter.

    `queue_of` gives the queue to answer to. Adapters wait for room in the order in which they asked.
    """

    def __init__(
        self,
        adapters: Mapping[str, Adapter],
        life: int,
        executor: Ref[Message],
        queue_of: Callable[[str | None], Ref[Message]],
    ) -> None:
        self._adapters = adapters
        self._life = life
        self._executor = executor
        self._queue_of = queue_of
        self._placed: set[str] = set()
        self._asked: OrderedDict[str, None] = OrderedDict()  # placing, or waiting for room

    async def started(self) -> None:
        """Forget what was meant for an earlier life."""
        self.drain()

    async def receive(self, message: Message) -> None:
        """Handle one message."""
        match message:
            case Pin(adapter=digest, life=self._life):
                if digest in self._placed:
                    self._answer(digest, None)
                elif digest not in self._asked:
                    self._asked[digest] = None
                    self._executor.tell(Place(self._adapters[digest]))
            case Placed(adapter=digest, placed=placed, error=error):
                if placed or error is not None:
                    self._asked.pop(digest, None)
                    if placed:
                        self._placed.add(digest)
                    self._answer(digest, error)
            case Unpin(adapter=digest, life=self._life):
                self._placed.discard(digest)
                self._executor.tell(Release(digest))
                for waiting in self._asked:  # there may be room now
                    self._executor.tell(Place(self._adapters[waiting]))

    def _answer(self, digest: str, error: str | None) -> None:
        self._queue_of(digest).tell(Pinned(digest, self._life, error))
