"""The connection between the frontend and the engine core: msgpack frames over a pair of Unix sockets, or
over TCP to another machine (`actors/cluster/`).

The pair has no name: no other process can connect to it. A frame is its length, four bytes little-endian, and
a message in msgpack; no pickle, nothing executable. The connection keeps order. When one side ends, the other
reads the end of the stream, so it knows that nothing more will come.
"""

from collections.abc import AsyncGenerator
from pathlib import Path
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
    KeepLoaded,
    KeepSession,
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


class Keep(msgspec.Struct, frozen=True):
    """An engine core that gets this outlives its frontend for so many seconds: see `actors/keeping.py`.
    `folder` is where it listens, `ticket` what the next frontend must show, and `fingerprint` stands for
    everything that it loads."""

    seconds: float
    folder: Path
    ticket: bytes
    fingerprint: bytes


class StandBy(Message, frozen=True):
    """From the frontend to a spare process, before `Start`: what that will name. The process loads what two
    engine cores may have at the same time, and waits."""

    options: EngineOptions


class Start(Message, frozen=True):
    """From the frontend, before anything but `StandBy`: what to load, the epoch's number, and the file
    descriptor by which the engine core attaches to its step recorder. Without `keep` it ends with its
    frontend."""

    options: EngineOptions
    epoch: int
    recorder_file: int
    keep: Keep | None = None


class Loading(Message, frozen=True):
    """From the engine core: the phase of its start, and how many bytes are done of how many, where it counts
    bytes."""

    phase: str
    done: int = 0
    total: int = 0


class LoadFailed(Message, frozen=True):
    """From the engine core, as its last message: the message of the LoadError that ended the start, and its
    class."""

    kind: str
    message: str


class Facts(msgspec.Struct, frozen=True):
    """What the frontend must know about the loaded model. A step has at most `max_seqs` sequences and
    `max_batch_tokens` tokens. `numerics` is what the tokens depend on. Other engines ask for its pages at
    `page_address`."""

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
    page_address: str | None = None


class Loaded(Message, frozen=True):
    """From the engine core: everything is loaded, and the actors start now."""

    facts: Facts


class Pulse(Message, frozen=True):
    """From the engine core, twice a second: its loop is alive.

    `busy`: the executor is working. `handled` is how many messages it has finished; it distinguishes an
    executor that hangs from one that has much to do. `actors` is what each of the engine core's actors is
    doing.
    """

    busy: bool
    handled: int
    actors: tuple[Gauge, ...] = ()


class Describe(Message, frozen=True):
    """From the frontend: log what every actor and every thread is doing."""


ToCore = Start | Submit | Cancel | Preempt | KeepSession | KeepLoaded | Pin | Unpin | Describe
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
    """Yield the messages that arrive, until the other side closes. Raises LineBroken for a frame that is too
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
    """A ref to actors in the other process: `tell` writes a frame to the connection.

    While it is closed it drops messages: whatever concerns a later epoch is sent again when that has begun.
    The live sequences bound how much waits to be written.
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
        """Send a message; never waits."""
        if self.is_open:
            self._frames += frame(message)
            self._arrived.set()

    def close(self) -> None:
        """Drop messages from now on: the other side is gone."""
        self.is_open = False
        self._frames.clear()

    async def write(self, line: ByteStream) -> None:
        """Write the messages to the connection, until cancelled or the other side is gone."""
        while True:
            if not self._frames:
                self._arrived = anyio.Event()
                await self._arrived.wait()
            data, self._frames = self._frames, bytearray()
            try:
                await line.send(bytes(data))
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                return  # the reader of the connection notices as well
