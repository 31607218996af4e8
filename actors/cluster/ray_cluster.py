"""A Ray cluster as the frontend sees it: the places for engines, and its machines.

A process of its own talks to Ray (`ray_driver.py`). Ray's library ends that process when the cluster's head
is gone, and its engines end with it. Then another one is started, as often as necessary.
"""

import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import anyio
from anyio import CancelScope, open_process
from anyio.abc import Process, SocketStream, TaskGroup

from personae.actors.cluster.contact import ClusterMessage, Contact
from personae.actors.cluster.frames import FrameReader
from personae.actors.cluster.node import version
from personae.actors.cluster.ray_messages import (
    Answer,
    AskNodes,
    BeginEngine,
    EndEngine,
    Gather,
    Gathered,
    Node,
    Nodes,
    NotDone,
    Placed,
    PlaceEngine,
)
from personae.actors.cluster.remote_process import StartEngine
from personae.actors.framing import frame
from personae.actors.kit.actor import unwrap
from personae.errors import EngineCoreDied, LoadError

COMMAND = (sys.executable, "-m", "personae.actors.cluster.ray_driver")
RETRY_SECONDS = 5.0  # between two attempts to reach the cluster
_FRAME = 2**24

log = logging.getLogger("personae.cluster")


class DriverGone(EngineCoreDied):
    """The process that talks to Ray has ended."""


class _Driver:
    """A process that talks to Ray."""

    def __init__(self, process: Process, stream: SocketStream) -> None:
        self.process = process
        self._stream = stream
        self._numbers = count(1)
        self._sending = anyio.Lock()
        self._waiting: dict[int, tuple[anyio.Event, list[Answer]]] = {}
        self.gone = False

    @classmethod
    async def start(cls) -> "_Driver":
        ours, theirs = socket.socketpair()
        with theirs:
            process = await open_process(
                [*COMMAND, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=None,
                stderr=None,
                env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the frontend
            )
        return cls(process, await SocketStream.from_socket(ours))

    async def read(self) -> None:
        """Read its answers until it ends."""
        answers: FrameReader[Any] = FrameReader(self._stream, Answer, _FRAME)
        while (answer := await answers.next()) is not None:
            if (waiting := self._waiting.pop(answer.number, None)) is not None:
                waiting[1].append(answer)
                waiting[0].set()
        self.gone = True
        for event, _ in self._waiting.values():
            event.set()

    async def ask(self, make: Callable[[int], ClusterMessage]) -> Any:
        """Send a request, made with its number, and return the answer. Raises LoadError for NotDone,
        DriverGone if the process ends."""
        if self.gone:
            raise DriverGone("The connection to Ray has ended.")
        number = next(self._numbers)
        event, answers = self._waiting[number] = anyio.Event(), []
        try:
            async with self._sending:
                await self._stream.send(frame(make(number)))
            await event.wait()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            self.gone = True
        finally:
            self._waiting.pop(number, None)
        match answers:
            case [NotDone(why=why)]:
                raise LoadError(why)
            case [answer]:
                return answer
        raise DriverGone("The connection to Ray has ended.")

    async def end(self) -> None:
        """Have the process give everything back to Ray and end."""
        with CancelScope(shield=True):
            await self._stream.aclose()
            with anyio.move_on_after(10.0) as slow:
                await self.process.wait()
            if slow.cancelled_caught:
                self.process.kill()
                await self.process.wait()
            await self.process.aclose()


class RayCluster:
    """Created by `open_ray`. `host` is this machine's address in the cluster; `nodes` are the cluster's nodes
    at the start."""

    def __init__(self, tasks: TaskGroup, gather: Callable[[int], Gather], model: Path, weights: str) -> None:
        self._tasks = tasks
        self._gather = gather
        self._model = str(model)
        self._weights = weights
        self._driver: _Driver | None = None
        self._starting = anyio.Lock()
        self._gathered = False
        self.admit: Callable[[str], None] = lambda certificate: None
        self.host = ""
        self.nodes: tuple[Node, ...] = ()

    async def connect(self) -> _Driver:
        """Return the process that talks to Ray; a new one if the last one has ended. Raises LoadError if the
        cluster can't be reached the first time; later it retries until it can."""
        async with self._starting:
            while self._driver is None or self._driver.gone:
                await self.end()
                self._driver = driver = await _Driver.start()
                self._tasks.start_soon(driver.read)
                try:
                    gathered: Gathered = await driver.ask(self._gather)
                except (LoadError, DriverGone) as error:
                    driver.gone = True
                    if not self._gathered:
                        raise
                    log.warning("the Ray cluster can't be reached: %s", error.message)
                    await anyio.sleep(RETRY_SECONDS)
                else:
                    self._gathered = True
                    self.host, self.nodes = gathered.host, gathered.nodes
            return self._driver

    async def place(self, engine: int) -> StartEngine:
        """Wait until there is a node for an engine. Returns a function that starts the engine there."""
        while True:
            driver = await self.connect()
            try:
                placed: Placed = await driver.ask(lambda number: PlaceEngine(number, engine))
                break
            except DriverGone:
                continue
        self.admit(placed.certificate)

        async def begin(contact: Contact) -> None:
            await driver.ask(
                lambda number: BeginEngine(number, engine, contact, version(), self._model, self._weights)
            )

        return begin

    async def leave(self, engine: int) -> None:
        """Free the place of an engine that is not needed any more."""
        if self._driver is not None:
            with suppress(DriverGone):  # its places are gone with it
                await self._driver.ask(lambda number: EndEngine(number, engine))

    async def look(self) -> tuple[Node, ...]:
        """Return the machines of the cluster, as Ray knows them now. Raises DriverGone."""
        driver = await self.connect()
        nodes: Nodes = await driver.ask(AskNodes)
        return nodes.nodes

    async def end(self) -> None:
        """Give everything back to Ray."""
        if self._driver is not None:
            await self._driver.end()
            self._driver = None


@asynccontextmanager
async def open_ray(
    address: str,
    host: str | None,
    replicas: int,
    cpus: float,
    gpus: float,
    model: Path,
    weights: str,
    stages: int = 1,
) -> AsyncIterator[RayCluster]:
    """Connect to a cluster and reserve places for `replicas` engines of a model, or for the `stages` of each,
    spread over its nodes; give them back at the end. `host` is this machine's address in the cluster, if it
    is known; `weights` is the model's digest.

    Raises LoadError if Ray is not installed, the cluster can't be reached, or it has no room.
    """
    if find_spec("ray") is None:
        raise LoadError("--ray needs Ray: pip install ray cryptography.")
    try:
        async with anyio.create_task_group() as tasks:
            cluster = RayCluster(
                tasks,
                lambda number: Gather(number, address, replicas, cpus, gpus, host, stages),
                model,
                weights,
            )
            try:
                await cluster.connect()
                yield cluster
            finally:
                await cluster.end()
            tasks.cancel_scope.cancel()
    except ExceptionGroup as group:
        raise unwrap(group) from None
