"""Stops gracefully: running requests finish, new ones are refused."""

import uuid

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from personae.api.wire.errors import error_response
from personae.errors import Overloaded

_STILL_SERVED = {"/health", "/metrics"}


class DrainMiddleware:
    """ASGI middleware around the whole app. It counts the requests in progress and, once it drains, refuses
    others (503, `/ready` too), so that load balancers and clients turn to another replica."""

    def __init__(self, app: ASGIApp, prefix: str = "") -> None:
        self._app = app
        self._prefix = prefix  # which a proxy may have left on the path
        self.active = 0
        self._idle = anyio.Event()
        self.draining = False
        self._over = False
        self._waiting: set[anyio.CancelScope] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] == "http" and self.draining and not self._still_serves(scope["path"]):
            response = error_response(Overloaded("The server is stopping.", code="shutting_down"))
            response.headers["connection"] = "close"
            response.headers["x-request-id"] = uuid.uuid4().hex
            await response(scope, receive, send)
            return

        async def send_last(message: Message) -> None:
            """During a drain, an answer is the last one on its connection, so that no other request arrives
            on it."""
            if message["type"] == "http.response.start" and self.draining:
                others = (pair for pair in message.get("headers", ()) if pair[0] != b"connection")
                message["headers"] = [*others, (b"connection", b"close")]
            await send(message)

        self.active += 1
        try:
            await self._app(scope, self._until_the_end(receive), send_last)
        finally:
            self.active -= 1
            if not self.active:
                self._idle.set()

    def _still_serves(self, path: str) -> bool:
        return path.removeprefix(self._prefix) in _STILL_SERVED

    def _until_the_end(self, receive: Receive) -> Receive:
        """As `receive`, but stops waiting for more of a request when the time has passed."""

        complete = False

        async def receive_in_time() -> Message:
            nonlocal complete
            if complete:
                return await receive()
            with anyio.CancelScope() as waiting:
                if self._over:
                    waiting.cancel()
                self._waiting.add(waiting)
                try:
                    message = await receive()
                finally:
                    self._waiting.discard(waiting)
            if waiting.cancelled_caught:
                why = "The server is stopping and the request is not complete."
                raise Overloaded(why, code="shutting_down")
            complete = not message.get("more_body", False)
            return message

        return receive_in_time

    def end(self) -> None:
        """The time has passed: requests whose bodies have not arrived are refused."""
        self._over = True
        for waiting in tuple(self._waiting):
            waiting.cancel()

    async def idle(self) -> None:
        """Wait until no request is in progress."""
        while self.active:
            self._idle = anyio.Event()
            await self._idle.wait()
