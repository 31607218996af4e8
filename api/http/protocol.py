"""The HTTP/1.1 protocol of uvicorn, with the limits that it lacks.

uvicorn's httptools protocol reads a request's head without a limit of size or time, and waits for ever for a
client that does not read its answer. Here a head has a maximum size and time, and so has a stalled reader.
After that the connection is closed, and everything that the request held is freed.

When a client leaves, uvicorn tells only its newest request. Here the one that is being answered hears of it
too: with pipelining, the newest one waits. uvicorn reads nothing meanwhile, so the socket is asked.

A client that still sends when its connection is closed gets its answer: see `lingering.py`.
"""

import asyncio
import select
import uuid
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from personae.api.http.flow import FLOW
from personae.api.http.lingering import LingeringTransport
from personae.api.settings import ApiSettings
from personae.api.wire.errors import error_answer, error_response
from personae.errors import Overloaded, PayloadTooLarge, PersonaeError, RequestError, RequestTimeout

LOOK_SECONDS = 1.0
"""Between two looks at whether a client has left whose next request waits."""

_LEFT = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR  # only Linux has the first


class GuardedProtocol(HttpToolsProtocol):
    """One connection. `guarded` makes a subclass for a server, which sets `settings`."""

    settings: ApiSettings = ApiSettings()
    writes: "TurnWrites"
    most_connections = 2**31
    transport: LingeringTransport

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes: int | None = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._look_timer: asyncio.TimerHandle | None = None
        self._has_room = True
        self._answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """A client connected; its first request's head is expected. If there are too many connections, it is
        answered 503."""
        super().connection_made(
            LingeringTransport(
                transport,
                self.loop,
                self._may_send,
                seconds=self.settings.linger_seconds,
                most=self.settings.linger_bytes,
            )
        )
        if len(self.connections) > self.most_connections:
            self._has_room = False
            self.app = _too_many_connections
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has disconnected."""
        self._cancel_head_timer()
        self._cancel_stall_timer()
        if self._look_timer is not None:
            self._look_timer.cancel()
        self.transport.close_now()
        super().connection_lost(exc)
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Bytes arrived. Refuses a head that grows over the limit before it is complete."""
        if self.transport.lingers:
            self.transport.discard(data)
            return
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        limit = self.settings.max_header_bytes
        if self._head_bytes is not None and self._head_bytes > limit and not self.transport.is_closing():
            error = PayloadTooLarge(f"The request's headers have more than {limit} bytes.", param="headers")
            error.status = 431
            self._refuse(error)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        if self._head_timer is None:
            self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header is complete. Trailers, which come after the body, are dropped."""
        if self._head_bytes is not None:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete; the body has its own limits, in the middleware."""
        self._head_bytes = None
        self._cancel_head_timer()
        super().on_headers_complete()
        if not self.pipeline:
            self._answering = self.cycle
        elif self._look_timer is None:
            self._look_timer = self.loop.call_later(LOOK_SECONDS, self._look)
        # The application begins in a later turn of the loop.
        self.scope["extensions"] = {FLOW: CycleFlow(self.cycle, self.writes)}  # type: ignore[dict-item]  # ours is no dict

    def on_message_complete(self) -> None:
        """The request is complete; the next bytes are another one's head."""
        super().on_message_complete()
        self._head_bytes = 0

    def on_response_complete(self) -> None:
        """An answer is complete; the next request that waits is answered."""
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client reads more slowly than the server writes. It has limited time to catch up."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self.settings.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._cancel_stall_timer()
        super().resume_writing()

    def shutdown(self) -> None:
        """The server stops. A client that has its answer is not waited for."""
        if self.transport.lingers:
            self.transport.close_now()
        super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """The bytes were not HTTP."""
        self._refuse(RequestError(msg, code="invalid_http"))

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self.settings.header_seconds, self._head_overdue)

    def _head_overdue(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._expect_head()  # nothing may be between the pieces of an answer, so check again later
            return
        if not self._head_bytes:
            self.transport.close()
            return
        self._refuse(
            RequestTimeout(
                f"The request's headers did not arrive within {self.settings.header_seconds:g} seconds.",
                param="headers",
            )
        )

    def _may_send(self) -> bool:
        """Whether more of a request may come, or has come and was not read. A connection for which there is
        no room does not wait for it."""
        return self._has_room and (self._head_bytes != 0 or bool(self.pipeline))

    def _look(self) -> None:
        """See whether the client has left: nothing is read while its next request waits."""
        self._look_timer = None
        if not self.pipeline or self.transport.is_closing():
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), _LEFT)
        if poll.poll(0):
            self.transport.abort()
        else:
            self._look_timer = self.loop.call_later(LOOK_SECONDS, self._look)

    def _refuse(self, error: PersonaeError) -> None:
        """Answer without the application, and close."""
        body = msgspec.json.encode(error_answer(error))
        status = HTTPStatus(error.status)
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            f"x-request-id: {uuid.uuid4().hex}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _cancel_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


class CycleFlow:
    """The `Flow` of one of uvicorn's requests."""

    __slots__ = ("_chunks", "_control", "_cycle", "_writes")

    def __init__(self, cycle: RequestResponseCycle, writes: "TurnWrites") -> None:
        self._cycle = cycle
        self._control = cycle.flow
        self._writes = writes
        self._chunks = b""

    @property
    def write_paused(self) -> bool:
        """As `Flow`."""
        return self._control.write_paused

    def write(self, body: bytes) -> None:
        """As `Flow`."""
        if not self._chunks:
            self._writes.add(self)
        self._chunks += b"%x\r\n%b\r\n" % (len(body), body)

    def flush(self) -> None:
        """As `Flow`."""
        chunks, self._chunks = self._chunks, b""
        if chunks and not self._cycle.disconnected and not self._cycle.transport.is_closing():
            self._cycle.transport.write(chunks)


class TurnWrites:
    """What all streams of a server write in a turn of the event loop is sent together, after that turn.

    After a system call the processor runs the next lines of Python slowly, because its caches have the
    kernel's code. So a step's tokens are all encoded before the first is sent.
    """

    def __init__(self) -> None:
        self._flows: list[CycleFlow] = []

    def add(self, flow: CycleFlow) -> None:
        """Flush `flow` after this turn."""
        if not self._flows:
            asyncio.get_running_loop().call_soon(self._flush)
        self._flows.append(flow)

    def _flush(self) -> None:
        flows, self._flows = self._flows, []
        for flow in flows:
            flow.flush()


async def _too_many_connections(scope: Scope, receive: Receive, send: Send) -> None:
    """The application of a connection for which there is no room."""
    response = error_response(Overloaded("The server has too many connections.", code="too_many_connections"))
    response.headers["connection"] = "close"
    await response(scope, receive, send)


def guarded(settings: ApiSettings, most_connections: int) -> type[GuardedProtocol]:
    """The protocol class for a server with these limits; uvicorn makes one instance per connection."""
    own = {"settings": settings, "most_connections": most_connections, "writes": TurnWrites()}
    return type("GuardedProtocol", (GuardedProtocol,), own)
