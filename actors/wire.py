"""The line between the frontend and the engine core: msgpack frames over a pair of Unix sockets, or over TCP
to another machine (`actors/cluster/`).

The pair has no name: there is nothing in the file system, or anywhere, that another process could connect to.
A frame is its length, four bytes little-endian, and a message in msgpack; no pickle, nothing that runs. The
line keeps order, and its end is the end of the other side: whoever reads it to the end knows that nothing
more will come.
"""

from collections.abc import AsyncGenerator
from typing import Any

import anyio
import msgspec
from anyio.abc import ByteStream

from personae.actors.client import ModelCard
from personae.actors.framing import HEADER, decoder, frame, frame_length
from personae.actors.kit.gauges import Gauge
from personae.actors.kit.mailbox import Ref
from personae.actors.messages import (
    AdapterStats,
    Cancel,
    EngineCoreStarted,
    KVEvents,
    Message,
    Pin,
    Pinned,
    Preempt,
    Refused,
    ReleaseRequest,
    StepDone,
    Submit,
    Unpin,
)
from personae.actors.options import EngineOptions
from personae.engine.generation_config import GenerationDefaults
from personae.engine.numerics import NumericsClass
from personae.lora.bounds import AdapterBounds

_CHUNK = 2**18


class Start(Message, frozen=True):
    """From the frontend, first of all: what to load, which life this is, and by which open file the engine
    core attaches to its black box."""

    options: EngineOptions
    epoch: int
    black_box: int


class Loading(Message, frozen=True):
    """From the engine core: how many of the weights' bytes are there."""

    done: int
    total: int


class LoadFailed(Message, frozen=True):
    """From the engine core, its last word: the LoadError of that class that ended the start."""

    kind: str
    message: str


class Facts(msgspec.Struct, frozen=True):
    """What the frontend has to know of the model that the engine core has loaded: at most `max_seqs`
    sequences and `max_batch_tokens` tokens are in a step. `numerics` is what its tokens depend on."""

    models: dict[str, ModelCard]
    max_model_len: int
    vocab_size: int
    defaults: GenerationDefaults
    max_adapters: int
    bounds: AdapterBounds
    about: str = ""
    max_seqs: int = 64
    max_batch_tokens: int = 512
    numerics: NumericsClass = NumericsClass()


class Loaded(Message, frozen=True):
    """From the engine core: everything is loaded, the actors start now."""

    facts: Facts


class Pulse(Message, frozen=True):
    """From the engine core, twice a second: its loop turns.

    `busy`: the executor has work in hand; `handled` is how many messages it has finished, so that one that
    hangs can be told from one that has much to do. `actors` is what each of the engine core's actors is
    doing.
    """

    busy: bool
    handled: int
    actors: tuple[Gauge, ...] = ()


class Describe(Message, frozen=True):
    """From the frontend: print what every actor and every thread is doing."""


ToCore = Start | Submit | Cancel | Preempt | Pin | Unpin | Describe
ToFrontend = (
    Loading
    | LoadFailed
    | Loaded
    | Pulse
    | EngineCoreStarted
    | StepDone
    | Refused
    | Pinned
    | ReleaseRequest
    | AdapterStats
    | KVEvents
)


async def messages(line: ByteStream, kind: Any) -> AsyncGenerator[Any, None]:
    """The messages that come, until the other side has gone. Raises LineBroken for a frame that is too
    long."""
    decode = decoder(kind).decode
    data = bytearray()
    while True:
        try:
            data += await line.receive(_CHUNK)
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return
        at = 0
        while len(data) - at >= HEADER:
            end = at + HEADER + frame_length(data, at)
            if end > len(data):
                break
            with memoryview(data) as view:
                message = decode(view[at + HEADER : end])
            yield message
            at = end
        del data[:at]


class Port(Ref[Message]):
    """A ref whose actors are in the other process: `tell` puts a frame on the line.

    While nobody is there it is silent: what concerns a epoch of the engine core that has not begun is said
    again when it has. What waits to be written is bounded by the sequences in the house.
    """

    __slots__ = ("_arrived", "_frames", "_path", "is_open")

    def __init__(self, path: str) -> None:
        self._path = path
        self._frames = bytearray()
        self._arrived = anyio.Event()
        self.is_open = False

    @property
    def path(self) -> str:
        """The name of the other side."""
        return self._path

    def tell(self, message: Message) -> None:
        """Send it; never waits."""
        if self.is_open:
            self._frames += frame(message)
            self._arrived.set()

    def close(self) -> None:
        """Nobody is there any more."""
        self.is_open = False
        self._frames.clear()

    async def write(self, line: ByteStream) -> None:
        """Send what is told, until cancelled or the other side is gone."""
        while True:
            if not self._frames:
                self._arrived = anyio.Event()
                await self._arrived.wait()
            data, self._frames = self._frames, bytearray()
            try:
                await line.send(bytes(data))
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                return  # who reads the line notices as well
