"""Requests that a worker passes on: ASGI's messages over the line, one at a time in each direction.

The main process pulls the request's body and waits until the connection has taken each piece of the answer.
So neither a large upload nor a slow reader fills the memory of either side.
"""

from typing import Any

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from personae.api.http_workers import messages as wire
from personae.api.http_workers.line import Line
from personae.errors import ActorStopped


class Forwarded:
    """A request in the main process, which a worker has passed on."""

    def __init__(self, request: wire.Forward, line: Line) -> None:
        self._request = request
        self._line = line
        self._gone = False  # nobody takes the answer
        self._over = False  # nothing more of the request comes
        self._pulled = False
        self._next: wire.Received | None = None
        self._received = anyio.Event()
        self._taken = anyio.Event()

    async def run(self, app: ASGIApp) -> None:
        """Serve it."""
        request = self._request
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": request.http_version,
            "method": request.method,
            "path": request.path,
            "raw_path": request.raw_path,
            "query_string": request.query,
            "root_path": "",
            "headers": list(request.headers),
            "scheme": request.scheme,
            "client": request.client,
            "server": request.server,
            "state": {},
        }
        await app(scope, self._receive, self._send)

    def take(self, message: wire.Received | wire.Taken) -> None:
        """A message of the worker's about it."""
        if isinstance(message, wire.Taken):
            self._taken.set()
            return
        self._next, self._pulled = message, False
        self._received.set()

    def disconnect(self) -> None:
        """Nobody waits for the answer: the worker has ended, or has given the request up."""
        self._gone = self._over = True
        self._received.set()
        self._taken.set()

    async def _receive(self) -> Message:
        if not self._over and self._next is None:
            self._received = anyio.Event()
            if not self._pulled:
                self._pulled = True
                self._line.tell(wire.Pull(self._request.number))
            await self._received.wait()
        found, self._next = self._next, None
        if found is None or found.disconnected:
            self._over = True
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": found.body, "more_body": found.more}

    async def _send(self, message: Message) -> None:
        if self._gone:
            return
        number = self._request.number
        if message["type"] == "http.response.start":
            headers = tuple((name, value) for name, value in message.get("headers", ()))
            self._line.tell(wire.AnswerBegins(number, message["status"], headers))
            return
        self._taken = anyio.Event()
        self._line.tell(
            wire.AnswerPiece(number, message.get("body", b""), bool(message.get("more_body", False)))
        )
        await self._taken.wait()


class Forwarder:
    """An ASGI app in a worker that has the main process serve its requests."""

    def __init__(self) -> None:
        self.line: Line | None = None  # once there is one
        self._open: dict[int, _Exchange] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, and its answer back."""
        line = self.line
        assert line is not None, "the worker is connected before it listens"
        number = line.next_number()
        self._open[number] = exchange = _Exchange(number, line, receive, send)
        try:
            line.tell(_forward(number, scope))
            await exchange.run()
        except BaseException:
            line.tell(wire.Gone(number))
            raise
        finally:
            del self._open[number]

    def take(self, message: Any) -> None:
        """A message of the main process's about one of the requests."""
        if (exchange := self._open.get(message.number)) is not None:
            exchange.take(message)

    def close(self) -> None:
        """The main process has ended."""
        for number, exchange in self._open.items():
            exchange.take(wire.AnswerEnds(number, broken=True))


class _Exchange:
    """One request and its answer in the worker."""

    def __init__(self, number: int, line: Line, receive: Receive, send: Send) -> None:
        self._number = number
        self._line = line
        self._receive = receive
        self._send = send
        self._arrived: list[Any] = []
        self._changed = anyio.Event()

    def take(self, message: Any) -> None:
        self._arrived.append(message)
        self._changed.set()

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            while True:
                while not self._arrived:
                    self._changed = anyio.Event()
                    await self._changed.wait()
                match message := self._arrived.pop(0):
                    case wire.Pull():
                        tasks.start_soon(self._pulled)
                    case wire.AnswerBegins(status=status, headers=headers):
                        start = {"type": "http.response.start", "status": status, "headers": list(headers)}
                        await self._send(start)
                    case wire.AnswerPiece(body=body, more=more):
                        await self._send({"type": "http.response.body", "body": body, "more_body": more})
                        self._line.tell(wire.Taken(self._number))
                    case wire.AnswerEnds():
                        break
            tasks.cancel_scope.cancel()
        if message.broken:
            raise ActorStopped("The answer is not complete.")

    async def _pulled(self) -> None:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._line.tell(wire.Received(self._number, disconnected=True))
        else:
            body, more = message.get("body", b""), bool(message.get("more_body", False))
            self._line.tell(wire.Received(self._number, body, more))


def _forward(number: int, scope: Scope) -> wire.Forward:
    server = scope.get("server")
    client = scope.get("client")
    return wire.Forward(
        number,
        scope["method"],
        scope["path"],
        scope.get("raw_path") or scope["path"].encode(),
        scope["query_string"],
        tuple((name, value) for name, value in scope["headers"]),
        scope["scheme"],
        scope["http_version"],
        None if client is None else (client[0], client[1]),
        None if server is None else (server[0], server[1]),
    )
