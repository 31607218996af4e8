"""The frontend's port for engines on other machines. A peer must show a ticket.

A ticket is valid for one connection and expires. If a peer shows no ticket in time, or a wrong one, the
frontend closes the connection and logs it. When there are too many such peers, the oldest are closed first,
so they cannot keep an engine out.
"""

import logging
import secrets
import socket
import ssl
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType

import anyio
from anyio import CancelScope, current_time, move_on_after
from anyio.abc import ByteStream, SocketAttribute, SocketStream, TaskGroup
from anyio.streams.tls import TLSStream

from personae.actors.cluster.contact import GREETING, TICKET_BYTES, UNKNOWN, WELCOME
from personae.actors.cluster.dial import is_loopback
from personae.engine.machine_sockets import (
    FRONTEND,
    TlsIdentity,
    new_identity,
    server_context,
    trust,
    tune,
)
from personae.errors import LoadError

HELLO_SECONDS = 10.0  # how long a peer may take to show its ticket
MAX_UNIDENTIFIED = 64  # peers that have shown no ticket yet
TICKET_SECONDS = 300.0  # from a process's start to its call; on a busy machine its imports take a minute
_LOG_SECONDS = 1.0  # seconds between two log lines about refused peers

log = logging.getLogger("personae.cluster")


class Expected:
    """An expected connection. Leaving its context withdraws the ticket, and closes a connection that nobody
    took."""

    def __init__(self, listener: "Listener", seconds: float) -> None:
        self.ticket = secrets.token_bytes(TICKET_BYTES)
        self.until = current_time() + seconds
        self._listener = listener
        self._arrived = anyio.Event()
        self._stream: ByteStream | None = None
        self._wanted = True

    def arrive(self, stream: ByteStream) -> bool:
        """Take the connection. Returns whether it is still wanted."""
        if self._wanted:
            self._stream = stream
            self._arrived.set()
        return self._wanted

    async def stream(self) -> ByteStream:
        """Wait for the connection. Raises TimeoutError when the ticket has expired."""
        with anyio.fail_after(self.until - current_time()):
            await self._arrived.wait()
        assert self._stream is not None
        stream, self._stream = self._stream, None
        return stream

    async def __aenter__(self) -> "Expected":
        self._listener.expected.append(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._wanted = False
        if self in self._listener.expected:
            self._listener.expected.remove(self)
        if self._stream is not None:
            with CancelScope(shield=True):
                await self._stream.aclose()


class Listener:
    """Created by `open_listener`. `certificate` is the one that engines have to trust; None on loopback."""

    def __init__(
        self, host: str, port: int, identity: TlsIdentity | None, tasks: TaskGroup, hello_seconds: float
    ) -> None:
        self.host = host
        self.port = port
        self.certificate = identity.certificate if identity else None
        self.expected: list[Expected] = []
        self.tasks = tasks  # they live as long as the listener
        self._context = server_context(identity) if identity else None
        self._unidentified: OrderedDict[int, CancelScope] = OrderedDict()
        self._hello_seconds = hello_seconds
        self._logged_at = -_LOG_SECONDS

    def expect(self, seconds: float = TICKET_SECONDS) -> Expected:
        """Make a ticket for one connection within `seconds`."""
        return Expected(self, seconds)

    def admit(self, certificate: str) -> None:
        """Allow the owner of this certificate's key to show a ticket."""
        if self._context is not None:
            trust(self._context, certificate)

    async def welcome(self, connection: SocketStream) -> None:
        """Wait for a peer's ticket, and pass the connection to the `Expected` of that ticket."""
        peer, reason = _name(connection), f"it showed no ticket within {self._hello_seconds:g} s"
        accepted = False
        try:
            with move_on_after(self._hello_seconds) as scope:
                self._unidentified[id(scope)] = scope
                while len(self._unidentified) > MAX_UNIDENTIFIED:
                    self._unidentified.popitem(last=False)[1].cancel()
                    reason = "too many others were waiting"
                try:
                    accepted = await self._identify(connection)
                    reason = "it showed a ticket that is unknown, used or too old"
                except (OSError, ssl.SSLError, anyio.EndOfStream, anyio.BrokenResourceError) as error:
                    reason = f"{type(error).__name__}: {error}".removesuffix(": ")
                finally:
                    self._unidentified.pop(id(scope), None)
        finally:
            if not accepted:
                with CancelScope(shield=True):
                    await anyio.aclose_forcefully(connection)
        if not accepted and current_time() - self._logged_at >= _LOG_SECONDS:
            self._logged_at = current_time()
            log.warning("closed the connection of %s to the port for engines: %s", peer, reason)

    async def _identify(self, connection: SocketStream) -> bool:
        tune(connection.extra(SocketAttribute.raw_socket))
        stream: ByteStream = connection
        if self._context is not None:
            stream = await TLSStream.wrap(
                connection, server_side=True, ssl_context=self._context, standard_compatible=False
            )
        hello = b""
        while len(hello) < len(GREETING) + TICKET_BYTES:
            hello += await stream.receive(len(GREETING) + TICKET_BYTES - len(hello))
            if hello[: len(GREETING)] != GREETING[: len(hello)]:
                return False  # it speaks another protocol, and would not understand an answer
        found = self._redeem(hello[len(GREETING) :])
        await stream.send(UNKNOWN if found is None else WELCOME)
        if found is None:
            return False
        return found.arrive(stream)

    def _redeem(self, ticket: bytes) -> Expected | None:
        """Compare with every ticket, so that the time does not depend on any of them."""
        now, found = current_time(), None
        for expected in self.expected:
            if secrets.compare_digest(expected.ticket, ticket) and now < expected.until:
                found = expected
        if found is not None:
            self.expected.remove(found)
        return found


def _name(connection: SocketStream) -> str:
    try:
        address = connection.extra(SocketAttribute.remote_address)
    except (OSError, anyio.TypedAttributeLookupError):
        return "a peer"  # it has disconnected already
    return ":".join(map(str, address[:2]))


@asynccontextmanager
async def open_listener(
    host: str, port: int = 0, hello_seconds: float = HELLO_SECONDS
) -> AsyncIterator[Listener]:
    """Listen at an address of this machine, with TLS unless it is loopback. Port 0 takes any free one.

    Raises LoadError if the address is not this machine's or the port is taken.
    """
    identity = None if is_loopback(host) else new_identity(FRONTEND)
    try:
        listening = await anyio.create_tcp_listener(local_host=host, local_port=port)
    except (OSError, socket.gaierror) as error:
        where = f"{host}:{port}" if port else host
        raise LoadError(
            f"The port for engines, {where}, can't be opened: {error.strerror or error}"
        ) from None
    async with listening, anyio.create_task_group() as tasks:
        bound = listening.extra(SocketAttribute.local_address)[1]
        listener = Listener(host, int(bound), identity, tasks, hello_seconds)
        tasks.start_soon(listening.serve, listener.welcome)
        yield listener
        tasks.cancel_scope.cancel()
