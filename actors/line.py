"""The engine core's end of a line to the frontend: blocking while it loads, a stream when it serves.

TLS is done here over memory (`Tls`), so that one session can be used in both ways.
"""

import socket
import ssl
from threading import Lock

import anyio
from anyio.abc import ByteStream, SocketStream

_CHUNK = 2**18


class Tls:
    """The client's side of a TLS session, without a socket. Threads may share it."""

    def __init__(self, context: ssl.SSLContext, server_name: str) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_name)
        self._lock = Lock()

    def handshake(self, connection: socket.socket) -> None:
        """Agree on keys. Raises ssl.SSLError when the other side is not who it should be, EOFError when it
        has gone."""
        while True:
            try:
                self._session.do_handshake()
            except ssl.SSLWantReadError:
                connection.sendall(self._outgoing.read())
                if not (data := connection.recv(_CHUNK)):
                    raise EOFError("the other side has gone") from None
                self._incoming.write(data)
            else:
                connection.sendall(self._outgoing.read())
                return

    def seal(self, data: bytes) -> bytes:
        """What has to be sent so that the other side reads `data`."""
        with self._lock, memoryview(data) as view:
            at = 0
            while at < len(view):
                at += self._session.write(view[at:])
            return self._outgoing.read()

    def open(self, received: bytes) -> bytes:
        """What the other side has written, as far as `received` completes it. Raises EOFError when it has
        closed the session, ssl.SSLError when the data were changed on their way."""
        plain = bytearray()
        with self._lock:
            self._incoming.write(received)
            try:
                while data := self._session.read(_CHUNK):
                    plain += data
                raise EOFError("the other side has gone")
            except ssl.SSLWantReadError:
                return bytes(plain)
            except ssl.SSLZeroReturnError:
                raise EOFError("the other side has gone") from None


class Line:
    """A connected socket, in the clear or with a TLS session that has shaken hands."""

    def __init__(self, connection: socket.socket, tls: Tls | None = None) -> None:
        self._connection = connection
        self._tls = tls
        self._plain = bytearray()
        self._sending = Lock()

    def recv(self, count: int) -> bytes:
        """Wait for data; at most `count` bytes. Empty: the other side has gone."""
        if self._tls is None:
            return self._connection.recv(count)
        while not self._plain:
            if not (received := self._connection.recv(_CHUNK)):
                return b""
            try:
                self._plain += self._tls.open(received)
            except EOFError:
                return b""
        data = bytes(self._plain[:count])
        del self._plain[:count]
        return data

    def sendall(self, data: bytes) -> None:
        """Send all of it; from any thread."""
        with self._sending:
            self._connection.sendall(data if self._tls is None else self._tls.seal(data))

    def settimeout(self, seconds: float | None) -> None:
        """How long `recv` and `sendall` may take before they raise TimeoutError."""
        self._connection.settimeout(seconds)

    def close(self) -> None:
        """The other side reads the end."""
        self._connection.close()

    async def stream(self) -> ByteStream:
        """The line from now on, in a loop."""
        stream = await SocketStream.from_socket(self._connection)
        return stream if self._tls is None else _TlsStream(stream, self._tls, bytes(self._plain))


class _TlsStream(ByteStream):
    def __init__(self, below: ByteStream, tls: Tls, plain: bytes) -> None:
        self._below = below
        self._tls = tls
        self._plain = bytearray(plain)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Wait for data."""
        while not self._plain:
            received = await self._below.receive(_CHUNK)
            try:
                self._plain += self._tls.open(received)
            except EOFError:
                raise anyio.EndOfStream from None
            except ssl.SSLError as error:
                raise anyio.BrokenResourceError from error
        data = bytes(self._plain[:max_bytes])
        del self._plain[:max_bytes]
        return data

    async def send(self, item: bytes) -> None:
        """Send all of it."""
        await self._below.send(self._tls.seal(item))

    async def send_eof(self) -> None:
        """A half-closed line is the end of both."""
        await self._below.send_eof()

    async def aclose(self) -> None:
        """The other side reads the end."""
        await self._below.aclose()
