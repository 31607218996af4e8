"""The adapter store with a simulated executor, and queues that only record."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio.lowlevel
import torch
from patience import soon
from recorders import MessageQueue

from personae.actors.enginecore.adapter_store import AdapterStore
from personae.actors.kit.mailbox import Ref
from personae.actors.kit.supervisor import Supervisor
from personae.actors.messages import LoadAdapter, Message
from personae.lora.adapter import Adapter, LoraPair, make_adapter
from personae.lora.library import AdapterLibrary
from personae.lora.shapes import LoraShapes
from personae.lora.sites import sites
from personae.lora.source import AdapterSource

EPOCH = 3


def adapter(seed: int) -> Adapter:
    pair = LoraPair(torch.full((1, 2), float(seed)), torch.ones(1, 2), 1.0)
    return make_adapter(f"{seed}", {(0, "q"): pair})


ADAPTERS = [adapter(seed) for seed in range(1, 8)]
DIGESTS = [each.digest for each in ADAPTERS]


def load(number: int) -> LoadAdapter:
    """The message that asks the executor to load this adapter."""
    return LoadAdapter(DIGESTS[number], AdapterSource(()))


class StubTarget(AdapterLibrary):
    """A library whose adapters are all on the host."""

    def __init__(self) -> None:
        super().__init__(LoraShapes(1, sites({"q": (2, 2)})), {}, None, 10**9)
        for each in ADAPTERS:
            self.put(each)


class Bench:
    """A store, and the messages that it sent."""

    def __init__(self, store: Ref[Message]) -> None:
        self.store = store
        self.executor = MessageQueue()
        self.streamer = MessageQueue()
        self.queues: dict[str | None, MessageQueue] = {}

    def queue_of(self, digest: str | None) -> MessageQueue:
        return self.queues.setdefault(digest, MessageQueue())

    async def offered(self, count: int) -> list[str]:
        """Wait for this many loads that the executor is asked for after threads have read them. Returns the
        digests."""
        await soon(
            lambda: sum(isinstance(each, LoadAdapter) for each in self.executor) >= count,
            f"{count} have been read",
        )
        await settled()
        return [each.adapter for each in self.executor.take() if isinstance(each, LoadAdapter)]

    async def tell(self, *messages: Message) -> list[str]:
        """Send messages. Returns the digests that the executor is then asked to load."""
        for message in messages:
            self.store.tell(message)
        await settled()
        return [each.adapter for each in self.executor.take() if isinstance(each, LoadAdapter)]


async def settled() -> None:
    """Let the other tasks run until they wait, without time passing."""
    for _ in range(30):
        await anyio.lowlevel.checkpoint()


@asynccontextmanager
async def bench(library: AdapterLibrary | None = None) -> AsyncIterator[Bench]:
    root = Supervisor("test", max_restarts=0)
    made: list[Any] = []
    store: Ref[Message] = root.spawn(
        "store",
        lambda: AdapterStore(
            library or StubTarget(), EPOCH, made[0].executor, made[0].queue_of, made[0].streamer
        ),
        capacity=100,
    )
    made.append(Bench(store))
    async with root:
        yield made[0]
