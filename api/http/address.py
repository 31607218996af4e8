"""The address of a server. It imports little, so that an address that cannot be used is an error at once."""

import errno
import re
import socket
from contextlib import suppress

from personae.errors import LoadError

_PATIENCE = 2.0  # seconds
_MOST = 10_000  # bytes


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket that is bound to the address but not listening yet: connections are refused until the
    server runs.

    Port 0 uses any free port. Raises LoadError if the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        hint = _hint(host, port) if error.errno == errno.EADDRINUSE else ""
        raise LoadError(f"Cannot listen on {host} port {port}: {error.strerror or error}.{hint}") from None
    return listener


def _hint(host: str, port: int) -> str:
    """What may listen on an address that is in use, and what to do."""
    found = None
    with suppress(OSError), socket.create_connection((host, port), timeout=_PATIENCE) as connected:
        connected.sendall(b"GET /version HTTP/1.0\r\nhost: localhost\r\n\r\n")
        connected.settimeout(_PATIENCE)
        answer = b"".join(iter(lambda: connected.recv(1000), b""))[:_MOST]
        found = re.search(rb'\{"version":\s*"([\w.+-]{1,40})"\}\s*$', answer)
    who = "Another program listens" if found is None else f"A server of version {found[1].decode()} answers"
    return f" {who} there; --port 0 takes a free port."


def url(listener: socket.socket, scheme: str = "http") -> str:
    """The URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
