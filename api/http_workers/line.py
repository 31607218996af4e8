"""One end of the connection between the main process and a worker: frames over a Unix socket, on asyncio.

`tell` sends at once if the socket takes it. So what a worker tells the main process arrives there before
anything that a client sends after it has read the worker's answer.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

import msgspec

from personae.actors.framing import HEADER, decoder, frame, frame_length
from personae.actors.messages import Message
from personae.api.http_workers.messages import CallResult
from personae.errors import ActorStopped

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CHUNK = 2**18


class Line:
    """Belongs to the event loop that runs when it is made. `receive` gets every message of `kind` that
    arrives. `closed` is called once, when the other side has ended."""

    def __init__(
        self,
        connection: socket.socket,
        kind: Any,
        receive: Callable[[Any], None],
        closed: Callable[[], None] = lambda: None,
    ) -> None:
        self._connection = connection
        self._decode = decoder(kind).decode
        self._receive = receive
        self._on_closed = closed
        self._loop = asyncio.get_running_loop()
        self._arrived = bytearray()
        self._unsent = bytearray()
        self._calls: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._numbers = count(1)
        self._sent = asyncio.Event()
        self.is_open = True
        connection.setblocking(False)
        self._loop.add_reader(connection, self._read)

    def tell(self, message: Message) -> None:
        """Send a message; never waits. Once the line is closed, messages are dropped."""
        if not self.is_open:
            return
        data = frame(message)
        if self._unsent:
            self._unsent += data
            return
        try:
            sent = self._connection.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            return  # the reader notices as well
        if sent < len(data):
            self._unsent += memoryview(data)[sent:]
            self._loop.add_writer(self._connection, self._write)

    async def ask(self, message: Callable[[int], Message], kind: type[T] | Any) -> T:
        """Send a call and return its result. Raises the PersonaeError with which it failed, ActorStopped if
        the line is closed."""
        call = next(self._numbers)
        if not self.is_open:
            raise _stopped()
        self._calls[call] = answer = self._loop.create_future()
        try:
            self.tell(message(call))
            value: T = msgspec.msgpack.decode(await answer, type=kind)
            return value
        finally:
            self._calls.pop(call, None)

    def call_soon(self, work: Callable[[], None]) -> None:
        """Call `work` when the event loop has done what it is doing."""
        self._loop.call_soon(work)

    def next_number(self) -> int:
        """A number that nothing else on this side of the line has."""
        return next(self._numbers)

    async def flush(self) -> None:
        """Wait until everything is sent, or the line is closed."""
        if self._unsent and self.is_open:
            self._sent = asyncio.Event()
            await self._sent.wait()

    def close(self) -> None:
        """Close this end. Calls that wait fail."""
        if not self.is_open:
            return
        self.is_open = False
        self._sent.set()
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._connection.close()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(_stopped())
        self._on_closed()

    def _write(self) -> None:
        try:
            with memoryview(self._unsent) as view:
                sent = self._connection.send(view[:_CHUNK])
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._connection)
            self._sent.set()

    def _read(self) -> None:
        try:
            data = self._connection.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._arrived += data
        try:
            while (body := self._next_body()) is not None:
                self._take(self._decode(body))
        except Exception:
            logger.exception("the line between the server's processes is broken")
            self.close()

    def _next_body(self) -> bytes | None:
        """The body of the next frame; None until it is complete. It is copied, because a `Raw` keeps it."""
        arrived = self._arrived
        if len(arrived) < HEADER or len(arrived) < (end := HEADER + frame_length(arrived, 0)):
            return None
        body = bytes(memoryview(arrived)[HEADER:end])
        del arrived[:end]
        return body

    def _take(self, message: Any) -> None:
        if not isinstance(message, CallResult):
            self._receive(message)
            return
        answer = self._calls.get(message.call)
        if answer is None or answer.done():
            return  # its caller has stopped waiting
        if message.failure is None:
            answer.set_result(message.value)
        else:
            answer.set_exception(message.failure.error())


def _stopped() -> ActorStopped:
    return ActorStopped("The server is stopping.", code="shutting_down")
