"""Calls ASGI apps without a server: complete exchanges, and exchanges in which the client misbehaves."""

import json
from collections.abc import Iterable
from typing import Any

import anyio
import anyio.lowlevel
import httpx
from starlette.types import ASGIApp, Message


def client(app: ASGIApp) -> httpx.AsyncClient:
    """An HTTP client that calls `app`. Answers arrive complete."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


class Visit:
    """One request whose client decides when it sends its body, when it reads, and when it disconnects."""

    def __init__(self, path: str, body: Any = None, *, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        self.path = path
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.chunks: list[bytes] = []
        self.may_send = anyio.Event()
        self.may_send.set()
        self._request_headers = [(b"content-type", b"application/json"), *headers]
        self._to_server, self._inbox = anyio.create_memory_object_stream[Message](100)
        if body is not None:
            self.say(json.dumps(body).encode(), more=False)

    def say(self, body: bytes, *, more: bool) -> None:
        """Send a piece of the body."""
        self._to_server.send_nowait({"type": "http.request", "body": body, "more_body": more})

    def leave(self) -> None:
        """Close the connection."""
        self._to_server.send_nowait({"type": "http.disconnect"})

    async def run(self, app: ASGIApp) -> "Visit":
        """Have the app serve this request."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": self._request_headers,
            "server": ("localhost", 80),
            "client": ("test", 1),
        }
        with self._to_server, self._inbox:
            await app(scope, self._inbox.receive, self._send)
        return self

    async def _send(self, message: Message) -> None:
        await self.may_send.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.chunks.append(message.get("body", b""))
            await anyio.lowlevel.checkpoint()

    @property
    def error(self) -> dict[str, Any]:
        """The error object of the answer."""
        detail: dict[str, Any] = json.loads(b"".join(self.chunks))["error"]
        return detail

    def events(self) -> list[Any]:
        """The events of the stream so far, with "[DONE]" as is."""
        lines = b"".join(self.chunks).decode().split("\n\n")
        data = [line.partition("data: ")[2] for line in lines if line]
        return [line if line == "[DONE]" else json.loads(line) for line in data]
