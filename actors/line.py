"""The engine core's end of the connection to the frontend: blocking while it loads, a stream when it serves.

TLS runs over memory here (`Tls`), so that one session can be used both ways.
"""

import socket
import ssl
from threading import Lock

import anyio
from anyio.abc import ByteStream, SocketStream

_CHUNK = 2**18


class Tls:
    """The client side of a TLS session, without a socket. Threads may share it."""

    def __init__(self, context: ssl.SSLContext, server_name: str) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_name)
        self._lock = Lock()

    def handshake(self, connection: socket.socket) -> None:
        """Do the TLS handshake. Raises ssl.SSLError if the other side cannot prove its identity, EOFError if
        it closes the connection."""
        while True:
            try:
                self._session.do_handshake()
            except ssl.SSLWantReadError:
                connection.sendall(self._outgoing.read())
                if not (data := connection.recv(_CHUNK)):
                    raise EOFError("the other side has closed the connection") from None
                self._incoming.write(data)
            else:
                connection.sendall(self._outgoing.read())
                return

    def seal(self, data: bytes) -> bytes:
        """Encrypt `data` and return the bytes to send."""
        with self._lock, memoryview(data) as view:
            at = 0
            while at < len(view):
                at += self._session.write(view[at:])
            return self._outgoing.read()

    def open(self, received: bytes) -> bytes:
        """Decrypt the data that `received` completes. Raises EOFError when the other side has closed the
        session, ssl.SSLError if the data were changed in transit."""
        plain = bytearray()
        with self._lock:
            self._incoming.write(received)
            try:
                while data := self._session.read(_CHUNK):
                    plain += data
                raise EOFError("the other side has closed the connection")
            except ssl.SSLWantReadError:
                return bytes(plain)
            except ssl.SSLZeroReturnError:
                raise EOFError("the other side has closed the connection") from None


class Line:
    """A connected socket, plain or with a TLS session whose handshake is done."""

    def __init__(self, connection: socket.socket, tls: Tls | None = None) -> None:
        self._connection = connection
        self._tls = tls
        self._plain = bytearray()
        self._sending = Lock()

    @property
    def own_host(self) -> str:
        """The address of this machine by which it reached the other one."""
        return str(self._connection.getsockname()[0])

    def recv(self, count: int) -> bytes:
        """Wait for data, at most `count` bytes. Empty: the other side has closed."""
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
        """Send all data. Any thread may call it."""
        with self._sending:
            self._connection.sendall(data if self._tls is None else self._tls.seal(data))

    def settimeout(self, seconds: float | None) -> None:
        """Set how long `recv` and `sendall` may take before they raise TimeoutError."""
        self._connection.settimeout(seconds)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    async def stream(self) -> ByteStream:
        """Return the connection as an async stream. Use only the stream from then on."""
        stream = await SocketStream.from_socket(self._connection)
        return stream if self._tls is None else _TlsStream(stream, self._tls, bytes(self._plain))


class _TlsStream(ByteStream):
    def __init__(self, stream: ByteStream, tls: Tls, plain: bytes) -> None:
        self._stream = stream
        self._tls = tls
        self._plain = bytearray(plain)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Wait for data."""
        while not self._plain:
            received = await self._stream.receive(_CHUNK)
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
        """Send all data."""
        await self._stream.send(self._tls.seal(item))

    async def send_eof(self) -> None:
        """Close the sending side."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """Close the connection."""
        await self._stream.aclose()
