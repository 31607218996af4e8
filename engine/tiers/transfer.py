"""Pages from one engine to another, over a socket.

    fetcher     a frame with `PagesWanted`: which pages, by the tokens before and in them
    holder      a frame with `PagesComing`: how many pages follow
    holder      their contents, one after the other, as `KVCache.read_pages` returns them

If both have NIXL (`nixl.py`), the holder puts each piece of the contents into a window and says where, the
fetcher reads it and says so, and the holder confirms that the piece lay there until then.

On one machine it is a Unix socket in a folder that only the server's user may enter. Between machines it is
TCP with TLS, where both sides show the certificate that the engines of one server have.

The tokens are compared one by one in the holder's prefix cache. The identity stands for everything else that
decides a page's content (see `tiers/disk.py`), so an engine never gets pages of another model or another
numerics class. A frame is its length, four bytes little-endian, and a message in msgpack.

Either side gives up at a deadline, however slowly the other one goes on. The fetcher keeps the pages that
came whole before it; the others are computed.
"""

import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256

import msgspec
import numpy as np

from personae.engine.plan import PageKey
from personae.engine.tiers.nixl import WINDOW_BYTES, NixlAgent
from personae.engine.tiers.tier import PageBytes

SEND_SECONDS = 5.0  # for a fetcher to ask, and again to take what it asked for
PIECE_BYTES = WINDOW_BYTES  # of pages that are read at once
CERTIFIED = "pages.personae"  # the name in the certificate of a server's engines
_LENGTH_BYTES = 4
_MOST_WANTED = 2**26  # bytes of a request: the tokens of 8 million positions
_MOST_ANSWER = 2**14
_DONE = b"\1"

ReadPages = Callable[[Sequence[int]], PageBytes]


class PagesWanted(msgspec.Struct, frozen=True):
    """The pages from number `first` on behind the root named `root`, where the pages have the tokens `chunks`
    (`page_names.chunk_bytes`). `nixl`: the fetcher can read them with NIXL."""

    identity: bytes
    root: bytes
    chunks: tuple[bytes, ...]
    first: int
    nixl: bool = False


class PagesComing(msgspec.Struct, frozen=True):
    """So many pages follow. With `refusal`, none ever will, for that reason. With `agent`, the metadata of
    the holder's NIXL agent, they are read from its memory."""

    count: int
    refusal: str = ""
    agent: bytes = b""


class PieceReady(msgspec.Struct, frozen=True):
    """The next `count` bytes of the contents lie at this address of the holder."""

    address: int
    count: int


class PageSource:
    """What an engine needs to give its pages to others. `read` is set when the KV cache is built; it may be
    called on any thread, for pages that nobody changes meanwhile. With an `agent` they go by NIXL, too."""

    def __init__(self, identity: str, page_bytes: int, agent: NixlAgent | None = None) -> None:
        self.agent = agent
        self.identity = sha256(f"{identity} {page_bytes}".encode()).digest()
        self.page_bytes = page_bytes
        self.read: ReadPages | None = None

    def refusal(self, wanted: PagesWanted) -> str:
        """Why this engine has no such pages; empty: it may have them."""
        if wanted.identity != self.identity:
            return "the other engine has another model or numerics class"
        return "" if 0 <= wanted.first < len(wanted.chunks) else "no pages are wanted"

    def contents(self, pages: Sequence[int]) -> Iterator[PageBytes]:
        """The contents of these pages, piece by piece."""
        assert self.read is not None
        size = max(PIECE_BYTES // self.page_bytes, 1)
        for at in range(0, len(pages), size):
            yield self.read(pages[at : at + size])


def receive_wanted(connection: socket.socket) -> PagesWanted:
    """The request of a fetcher. Raises OSError, EOFError, or msgspec.DecodeError for anything else."""
    deadline = time.monotonic() + SEND_SECONDS
    return msgspec.msgpack.decode(_receive_frame(connection, _MOST_WANTED, deadline), type=PagesWanted)


def send_pages(
    connection: socket.socket, contents: Iterator[PageBytes], count: int, agent: NixlAgent | None = None
) -> None:
    """Send `count` pages, by NIXL if there is an agent. Raises OSError or EOFError if the fetcher has gone,
    or takes too long."""
    deadline = time.monotonic() + SEND_SECONDS
    window = None if agent is None else agent.take_window()
    if agent is None or window is None:
        _send(connection, _frame(PagesComing(count)), deadline)
        for piece in contents:
            _send(connection, piece.data, deadline)
        return
    try:
        _send(connection, _frame(PagesComing(count, agent=agent.metadata)), deadline)
        for piece in contents:
            window.memory[: piece.nbytes] = piece.reshape(-1)
            _send(connection, _frame(PieceReady(window.address, piece.nbytes)), deadline)
            _exactly(connection, len(_DONE), deadline)
            _send(connection, _DONE, deadline)
    finally:
        agent.give_back(window)


def refuse_pages(connection: socket.socket, refusal: str) -> None:
    """Say that there are none. Raises OSError."""
    _send(connection, _frame(PagesComing(0, refusal)), time.monotonic() + SEND_SECONDS)


def fetch_pages(
    address: str,
    identity: bytes,
    path: Sequence[PageKey],
    first: int,
    page_bytes: int,
    seconds: float,
    tls: ssl.SSLContext | None = None,
    agent: NixlAgent | None = None,
) -> tuple[PageBytes, str]:
    """Fetch the pages of `path` from number `first` on from the engine at `address`: the path of a Unix
    socket, or `HOST:PORT`, which needs `tls`. Returns those that came within the time, in order,
    [pages, page_bytes]; and what went wrong, empty if nothing did."""
    deadline = time.monotonic() + seconds
    pages = np.empty((len(path) - first, page_bytes), np.uint8)
    chunks, got = tuple(key.tokens for key in path), 0
    wanted = PagesWanted(identity, path[0].parent, chunks, first, agent is not None)
    try:
        with _connected(address, tls, deadline) as connection:
            _send(connection, _frame(wanted), deadline)
            body = _receive_frame(connection, _MOST_ANSWER, deadline)
            answer = msgspec.msgpack.decode(body, type=PagesComing)
            if answer.refusal or not 0 <= answer.count <= len(pages):
                return pages[:0], answer.refusal or "it offered more pages than were wanted"
            buffer = pages[: answer.count].reshape(-1).data
            pieces = (
                _read_pieces(connection, agent, answer.agent, buffer, deadline)
                if agent is not None and answer.agent
                else _receive_pieces(connection, buffer, deadline)
            )
            for count in pieces:
                got += count
    except (OSError, EOFError, msgspec.DecodeError) as error:
        return pages[: got // page_bytes], str(error) or type(error).__name__
    return pages[: answer.count], ""


def _receive_pieces(connection: socket.socket, buffer: memoryview, deadline: float) -> Iterator[int]:
    """Fill the buffer with what comes. Yields the bytes of each piece."""
    while buffer:
        connection.settimeout(_left(deadline))
        if not (count := connection.recv_into(buffer)):
            raise EOFError("it closed the connection")
        yield count
        buffer = buffer[count:]


def _read_pieces(
    connection: socket.socket, agent: NixlAgent, holder: bytes, buffer: memoryview, deadline: float
) -> Iterator[int]:
    """Fill the buffer with what lies in the memory of the agent `holder`. Yields the bytes of each piece."""
    window = agent.take_window()
    if window is None:
        raise TimeoutError("all windows of NIXL are in use")
    try:
        while buffer:
            body = _receive_frame(connection, _MOST_ANSWER, deadline)
            ready = msgspec.msgpack.decode(body, type=PieceReady)
            if not 0 < ready.count <= min(len(buffer), len(window.memory)):
                raise EOFError("it offered more than was wanted")
            agent.read(holder, ready.address, ready.count, window, deadline)
            buffer[: ready.count] = window.memory[: ready.count].data
            _send(connection, _DONE, deadline)
            _exactly(connection, len(_DONE), deadline)  # else others' pages may have lain there
            yield ready.count
            buffer = buffer[ready.count :]
    finally:
        agent.give_back(window)


def _connected(address: str, tls: ssl.SSLContext | None, deadline: float) -> socket.socket:
    """A connection to the engine at this address. Raises OSError."""
    if address.startswith("/"):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_left(deadline))
            connection.connect(address)
        except BaseException:
            connection.close()
            raise
        return connection
    if tls is None:
        raise ConnectionRefusedError("it is on another machine, and this engine has no certificate")
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), _left(deadline))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else TLS is 100 times slower
    connection.settimeout(_left(deadline))
    return tls.wrap_socket(connection, server_hostname=CERTIFIED)  # closes it if the handshake fails


def _left(deadline: float) -> float:
    """The seconds until the deadline. Raises TimeoutError after it."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("it took too long")
    return left


def _send(connection: socket.socket, data: bytes | memoryview, deadline: float) -> None:
    """Send all of it. Not by `sendall`: TLS would begin its time again with every part."""
    left = memoryview(data).cast("B")
    while left:
        connection.settimeout(_left(deadline))
        left = left[connection.send(left) :]


def _frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


def _receive_frame(connection: socket.socket, most: int, deadline: float) -> bytes:
    length = int.from_bytes(_exactly(connection, _LENGTH_BYTES, deadline), "little")
    if length > most:
        raise EOFError(f"it announced {length} bytes; the limit is {most}")
    return bytes(_exactly(connection, length, deadline))


def _exactly(connection: socket.socket, count: int, deadline: float) -> bytearray:
    data = bytearray()
    while len(data) < count:
        connection.settimeout(_left(deadline))
        if not (more := connection.recv(min(count - len(data), 2**20))):
            raise EOFError("it closed the connection")
        data += more
    return data
