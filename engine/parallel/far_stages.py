"""The stages of a model on other machines: their ranks, and how all ranks connect.

A stage is on one machine, because its ranks add up in shared memory. Stages may be on different ones. Then
each rank of the other stages listens on a TCP port. The first rank calls all of them to give its orders, and
each rank calls the rank with its own number in the next stage. The last stage calls nobody: the
first stage, which nobody can call, calls it. A caller says what for in one byte. All use TLS 1.3 and show the
identity that was made for this engine, so no other can call.
"""

import socket
import ssl
from contextlib import suppress

import msgspec

from personae.engine.machine_sockets import TlsIdentity, client_context, server_context, trust, tune

CERTIFIED = "ranks.personae"  # the name in the certificate of an engine's ranks
ORDERS, BEFORE, AFTER = b"o", b"b", b"a"  # a caller is the first rank, the stage before, or the stage after
CONNECT_SECONDS = 60.0  # for a rank to be called; it may have to start first
CALLED_SECONDS = 300.0  # until all have called
_HELLO_SECONDS = 10.0  # for a caller to show that it has the identity
_LENGTH_BYTES = 8

Address = tuple[str, int]


class FarStages(msgspec.Struct, frozen=True):
    """Where the ranks of all stages but the first listen, stage by stage, and the identity of all ranks."""

    addresses: tuple[tuple[Address, ...], ...]
    identity: TlsIdentity

    def links(self, rank: int, stage: int) -> "FarLinks":
        """How the rank with this number in this stage connects to the stages before and after."""
        last = len(self.addresses)
        return FarLinks(
            self.addresses[-1][rank] if stage == 0 else None,
            self.addresses[stage][rank] if stage < last else None,
            self.identity,
        )


class FarLinks(msgspec.Struct, frozen=True):
    """How a rank connects to the stages before and after its own: it calls the rank at this address; None:
    that one calls."""

    before: Address | None
    after: Address | None
    identity: TlsIdentity


class Callers:
    """The ranks that call this one. `listener` is its open port."""

    def __init__(self, listener: socket.socket, identity: TlsIdentity) -> None:
        self._listener = listener
        self._tls = server_context(identity)
        self._tls.num_tickets = 0  # nobody calls again
        trust(self._tls, identity.certificate)
        self._arrived: dict[bytes, ssl.SSLSocket] = {}

    def take(self, purpose: bytes) -> ssl.SSLSocket:
        """Wait for the call for this purpose. Raises TimeoutError."""
        self._listener.settimeout(CALLED_SECONDS)
        while purpose not in self._arrived:
            connection, _ = self._listener.accept()
            with suppress(OSError):  # not a rank of this engine
                connection.settimeout(_HELLO_SECONDS)
                tune(connection)
                caller = self._tls.wrap_socket(connection, server_side=True)
                self._arrived[caller.recv(1)] = caller
                caller.settimeout(None)
        return self._arrived.pop(purpose)


def call(address: Address, purpose: bytes, identity: TlsIdentity) -> ssl.SSLSocket:
    """Call a rank of the engine. Raises OSError if it does not answer, or is another."""
    connection = socket.create_connection(address, CONNECT_SECONDS)
    tune(connection)
    called = client_context(identity, identity.certificate).wrap_socket(connection, server_hostname=CERTIFIED)
    called.sendall(purpose)
    called.settimeout(None)
    return called


def connect(links: FarLinks, callers: Callers | None) -> tuple[socket.socket, socket.socket]:
    """Connect to the stages before and after. Raises OSError."""

    def connected(address: Address | None, says: bytes, hears: bytes) -> socket.socket:
        if address is not None:
            return call(address, says, links.identity)
        assert callers is not None
        return callers.take(hears)

    after = connected(links.after, BEFORE, AFTER)
    return connected(links.before, AFTER, BEFORE), after


class Channel:
    """Messages to a rank on another machine, and its answers; as with a `Connection` to one of this."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._connection = connection

    def send_bytes(self, message: bytes) -> None:
        """Send a message. Raises OSError if the other side has gone."""
        self._connection.sendall(len(message).to_bytes(_LENGTH_BYTES, "little"))
        self._connection.sendall(message)

    def recv_bytes(self) -> bytes:
        """Wait for a message. Raises EOFError if the other side has gone, or OSError."""
        return bytes(self._exactly(int.from_bytes(self._exactly(_LENGTH_BYTES), "little")))

    def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        rest = memoryview(data)
        while rest:
            if not (received := self._connection.recv_into(rest)):
                raise EOFError("the other side has closed the connection")
            rest = rest[received:]
        return data

    def fileno(self) -> int:
        """The connection's descriptor, which is readable when a message arrives."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close the connection, which a thread that waits for a message notices, too."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
