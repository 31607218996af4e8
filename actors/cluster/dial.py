"""How an engine's node connects to the frontend: TCP, TLS beyond loopback, then its ticket."""

import ipaddress
import os
import socket
import ssl
import time

import msgspec

from personae.actors.cluster.contact import GREETING, WELCOME, Contact, Dial
from personae.actors.cluster.identity import FRONTEND, client_context
from personae.actors.line import Line, Tls
from personae.actors.memory_file import open_memory_file
from personae.errors import LoadError

PATIENCE = 30.0  # seconds in which the frontend has to be reached
_ONE_TRY = 10.0
_PAUSE = 0.25


def is_loopback(host: str) -> bool:
    """Whether an address (no name) is one of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def dial(call: Dial, ticket: bytes, patience: float = PATIENCE) -> Line:
    """A connection to the frontend. Raises LoadError if it can't be reached in time, is not who it should be,
    or refuses the ticket."""
    contact = call.contact
    until = time.monotonic() + patience
    while True:
        try:
            return _dial_once(call, ticket)
        except ssl.SSLCertVerificationError as error:
            raise LoadError(
                f"Who listens at {contact.host}:{contact.port} is not the frontend: {error.verify_message}"
            ) from None
        except (OSError, EOFError) as error:
            if time.monotonic() > until:
                raise LoadError(
                    f"The frontend at {contact.host}:{contact.port} can't be reached from "
                    f"{socket.gethostname()}: {error}"
                ) from None
            time.sleep(_PAUSE)


def _dial_once(call: Dial, ticket: bytes) -> Line:
    contact = call.contact
    connection = socket.create_connection((contact.host, contact.port), _ONE_TRY)
    try:
        tune(connection)
        line = Line(connection, _session(call, contact, connection))
        line.sendall(GREETING + ticket)
        answer = line.recv(1)
    except BaseException:
        connection.close()
        raise
    if not answer:
        connection.close()
        raise EOFError("it hung up")
    if answer != WELCOME:
        connection.close()
        raise LoadError(
            f"The frontend at {contact.host}:{contact.port} does not know the ticket: it was used, or is too "
            "old."
        )
    line.settimeout(None)
    return line


def _session(call: Dial, contact: Contact, connection: socket.socket) -> Tls | None:
    if contact.certificate is None:
        if not is_loopback(contact.host):
            raise LoadError(f"{contact.host} is not loopback, and the frontend has sent no certificate.")
        return None
    assert call.identity is not None
    session = Tls(client_context(call.identity, contact.certificate), FRONTEND)
    session.handshake(connection)
    return session


def tune(connection: socket.socket) -> None:
    """Send at once, and notice within half a minute that the other machine has gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if (option := getattr(socket, name, None)) is not None:  # Linux has them
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def write_call(call: Dial) -> int:
    """A file, nowhere but in memory, from which another process reads whom to call; returns its number."""
    return open_memory_file(msgspec.msgpack.encode(call))


def read_call(file: int) -> Dial:
    """What `write_call` wrote; closes the file."""
    with os.fdopen(file, "rb") as reader:
        return msgspec.msgpack.decode(reader.read(), type=Dial)
