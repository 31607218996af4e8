"""How an engine's node connects to the frontend: TCP, TLS beyond loopback, then its ticket."""

import ipaddress
import os
import socket
import ssl
import time

import msgspec

from personae.actors.cluster.contact import GREETING, WELCOME, Contact, Dial
from personae.actors.line import Line, Tls
from personae.engine.machine_sockets import FRONTEND, client_context, tune
from personae.errors import LoadError
from personae.kernels.memory_file import open_memory_file

DIAL_SECONDS = 30.0  # seconds to reach the frontend
_TRY_SECONDS = 10.0  # seconds per attempt
_PAUSE = 0.25


def is_loopback(host: str) -> bool:
    """Whether an address (not a name) is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def dial(call: Dial, ticket: bytes, seconds: float = DIAL_SECONDS) -> Line:
    """Connect to the frontend. Raises LoadError if it can't be reached in time, cannot prove its identity, or
    refuses the ticket."""
    contact = call.contact
    until = time.monotonic() + seconds
    while True:
        try:
            return _dial_once(call, ticket)
        except ssl.SSLCertVerificationError as error:
            raise LoadError(
                f"The server at {contact.host}:{contact.port} is not the frontend: {error.verify_message}"
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
    connection = socket.create_connection((contact.host, contact.port), _TRY_SECONDS)
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
        raise EOFError("it closed the connection")
    if answer != WELCOME:
        connection.close()
        raise LoadError(
            f"The frontend at {contact.host}:{contact.port} does not know the ticket: it was used before, "
            "or it is too old."
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


def write_call(call: Dial) -> int:
    """Write a contact to a file in memory, for another process. Returns the file's descriptor."""
    return open_memory_file(msgspec.msgpack.encode(call))


def read_call(file: int) -> Dial:
    """Read what `write_call` wrote, and close the file."""
    with os.fdopen(file, "rb") as reader:
        return msgspec.msgpack.decode(reader.read(), type=Dial)
