"""MCP servers for tests: a real one by the `mcp` package, and ones that misbehave."""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from live_server import serving
from starlette.types import Receive, Scope, Send

MISSING = "mcp is not installed: pip install 'mcp>=2'"

_BOMB = gzip.compress(b" " * 2**24, compresslevel=1)


@dataclass
class WeatherServer:
    """A server of four tools that records what it is asked. `failing` says what is wrong with it."""

    address: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    failing: str | None = None
    fail_on: str | None = None  # a JSON-RPC method; None: on everything

    @property
    def url(self) -> str:
        """Its endpoint."""
        return f"{self.address}/team/mcp"

    def tool(self, **fields: Any) -> dict[str, Any]:
        """The server as a tool of a request, whose calls need no approval."""
        asked = {"type": "mcp", "server_label": "weather", "server_url": self.url}
        return {**asked, "require_approval": "never", **fields}


@contextmanager
def weather_server() -> Iterator[WeatherServer]:
    """A live one. Skips the test without the package."""
    pytest.importorskip("mcp", reason=MISSING)
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp_types import ToolAnnotations

    seen = WeatherServer()
    made = MCPServer("weather")

    @made.tool(description="The weather in a city.", annotations=ToolAnnotations(read_only_hint=True))
    def get_weather(city: str) -> str:
        seen.calls.append(("get_weather", city))
        return f"12 degrees in {city}"

    @made.tool(description="Sends mail.")
    def send_mail(to: str) -> str:
        seen.calls.append(("send_mail", to))
        return "sent"

    @made.tool(name="break/down", description="Fails.")
    def break_down() -> str:
        raise ToolError("the pump is broken")

    @made.tool(description="Says much.")
    def say_much(size: int) -> str:
        return "x" * size

    real = made.streamable_http_app(streamable_http_path="/team/mcp")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await real(scope, receive, send)
            return
        seen.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        body = b""
        while scope["method"] == "POST":
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        method = json.loads(body).get("method", "") if body else scope["method"]
        seen.methods.append(method)
        if seen.failing is not None and seen.fail_on in (None, method):
            await _misbehave(seen.failing, receive, send)
            return
        given = False

        async def again() -> Any:
            nonlocal given
            if given or not body:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await real(scope, again, send)

    with serving(app, around=real.router.lifespan_context(real)) as seen.address:
        yield seen


async def _misbehave(how: str, receive: Receive, send: Send) -> None:
    async def answer(status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
        kind = (b"content-type", b"application/json")
        await send({"type": "http.response.start", "status": status, "headers": [kind, *headers]})
        await send({"type": "http.response.body", "body": body})

    match how:
        case "hangs":
            while (await receive())["type"] != "http.disconnect":
                await anyio.lowlevel.checkpoint()
        case "unauthorized":
            await answer(401, b"{}")
        case "large":
            await answer(200, b"[" + b"1," * 5_000_000 + b"1]")
        case "bomb":
            await answer(200, _BOMB, (b"content-encoding", b"gzip"))
        case "garbage":
            await answer(200, b"<html>")
        case "redirect":
            await answer(307, b"", (b"location", b"/elsewhere/mcp"))
        case "dies":
            raise RuntimeError("planted")
