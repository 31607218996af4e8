"""A session with an MCP server, as an actor: a task of its own has the connection, and answers one question
at a time.

So whatever the connection does (it breaks, it hangs, the library raises in a task of its own), only the
question fails. The next one opens another session. A question has a time limit, and an answer a limit in
bytes. Redirects are not followed, because they could lead to a server that the operator does not allow.

https://modelcontextprotocol.io/specification
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
from anyio import CancelScope, Event, current_time

from personae.actors.kit.background import background_tasks
from personae.api.wire.tolerant import Tolerant
from personae.kernels.sizes import size_text

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import CallToolResult, ContentBlock

MOST_BYTES = 2**20
"""Bytes of one answer of a server."""
MOST_TOOLS = 128
"""Tools of one server."""
_MOST_PAGES = 16  # of a list of tools
_GOODBYE_SECONDS = 1.0  # for the end of a session
_LONGEST_MESSAGE = 1000  # characters of a server's error

TIMEOUT, CLOSED, INVALID, PARSE = -32001, -32000, -32600, -32700
"""Codes of JSON-RPC errors: no answer in time, no connection, not as the protocol says, unreadable."""

_ENDS_SESSION = (CLOSED, INVALID)

# The library's errors quote what servers send, and the HTTP client's lines have whole URLs.
for _name in ("mcp", "client"):  # the second is the one of `mcp.client.session`
    logging.getLogger(_name).setLevel(logging.CRITICAL)
logging.getLogger("httpx2").setLevel(logging.WARNING)


@dataclass(frozen=True, slots=True)
class McpServer:
    """A server. `headers` go to the server only; they are not shown, logged or stored. `seconds` is the time
    of one answer."""

    label: str
    url: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    seconds: float


class McpTool(Tolerant, omit_defaults=True):
    """A tool as its server describes it. `annotations` are the server's hints, such as `readOnlyHint`."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    annotations: dict[str, Any] | None = None

    @property
    def read_only(self) -> bool:
        """Whether the server says that a call changes nothing."""
        return bool((self.annotations or {}).get("readOnlyHint"))


class McpFailed(Exception):
    """A server did not answer, or not as the protocol says. `code` is JSON-RPC's."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class ToolFailed(Exception):
    """The tool says that it failed; `text` says why."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class _TooLarge(Exception):
    pass


@dataclass(slots=True)
class _Question:
    """What is asked in a session, and its outcome."""

    ask: "Callable[[Client], Awaitable[Any]]"
    done: Event = field(default_factory=Event)
    answer: Any = None
    error: Exception | None = None


class McpSession:
    """Asks one server. `run` is the actor's task; use `session` to have it run."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._ask, self._inbox = anyio.create_memory_object_stream[_Question](1)
        self._ended = Event()
        self._status: int | None = None  # of an HTTP answer that is no success
        self._too_large = False

    async def tools(self) -> list[McpTool]:
        """All tools of the server. Raises McpFailed."""

        async def ask(client: "Client") -> list[McpTool]:
            found: list[McpTool] = []
            cursor: str | None = None
            for _ in range(_MOST_PAGES):
                page = await client.list_tools(cursor=cursor)
                for tool in page.tools:
                    hints = tool.annotations
                    shown = None if hints is None else hints.model_dump(by_alias=True, exclude_none=True)
                    found.append(McpTool(tool.name, tool.input_schema, tool.description, shown))
                cursor = page.next_cursor
                if cursor is None and len(found) <= MOST_TOOLS:
                    return found
            raise McpFailed(f"it has more than {MOST_TOOLS} tools, or more than {_MOST_PAGES} pages", INVALID)

        answer: list[McpTool] = await self._answer(ask)
        return answer

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The answer of a tool as text. Raises ToolFailed, or McpFailed."""

        async def ask(client: "Client") -> str:
            result = await _called(client, name, arguments)
            text = _text(result)
            if result.is_error:
                raise ToolFailed(text)
            return text

        answer: str = await self._answer(ask)
        return answer

    async def _answer(self, ask: "Callable[[Client], Awaitable[Any]]") -> Any:
        question = _Question(ask)
        await self._ask.send(question)
        await question.done.wait()
        if question.error is not None:
            raise question.error
        return question.answer

    async def close(self) -> None:
        """End the session, which takes a second at most."""
        self._ask.close()
        with anyio.move_on_after(_GOODBYE_SECONDS):
            await self._ended.wait()

    def abandon(self) -> None:
        """Take no more questions."""
        self._ask.close()

    async def run(self) -> None:
        """Answer questions until the session is closed."""
        with self._inbox:
            question = await self._next()
            while question is not None:
                question = await self._connected(question)
        self._ended.set()

    async def _next(self) -> _Question | None:
        try:
            return await self._inbox.receive()
        except anyio.EndOfStream:
            return None

    async def _connected(self, question: _Question | None) -> _Question | None:
        """Open a session, and answer in it as long as it lasts. Returns a question that is left."""
        reason: Exception | None = None
        with CancelScope(deadline=current_time() + self._server.seconds) as patience:
            try:
                async with self._open() as client:
                    while question is not None:
                        patience.deadline = current_time() + self._server.seconds
                        lasts = await self._settle(question, client)
                        question.done.set()
                        question, patience.deadline = None, inf
                        if not lasts:
                            break
                        question = await self._next()
                    patience.deadline = current_time() + _GOODBYE_SECONDS
            except Exception as error:
                reason = error
        if question is not None:
            if patience.cancelled_caught:
                question.error = McpFailed(f"it did not answer within {self._server.seconds:g} s", TIMEOUT)
            else:
                question.error = self._why(reason)
            question.done.set()
        return await self._next()

    async def _settle(self, question: _Question, client: "Client") -> bool:
        """Answer a question. Returns whether the session lasts."""
        from mcp import MCPError

        self._status, self._too_large = None, False
        try:
            question.answer = await question.ask(client)
        except (ToolFailed, McpFailed) as error:
            question.error = error
        except MCPError as error:
            question.error = self._why(error)
            return error.code not in _ENDS_SESSION and not self._too_large
        return True

    def _why(self, error: Exception | None) -> McpFailed:
        """Why there is no answer."""
        import httpx2
        from mcp import MCPError

        leaves = [] if error is None else list(_leaves(error))
        if self._too_large or any(isinstance(leaf, _TooLarge) for leaf in leaves):
            return McpFailed(f"its answer has more than {size_text(MOST_BYTES)}, or is compressed", INVALID)
        if self._status is not None:
            return McpFailed(f"it answered with the HTTP status {self._status}", INVALID)
        for leaf in leaves:
            if isinstance(leaf, McpFailed):
                return leaf
            if isinstance(leaf, MCPError) and leaf.code == PARSE:
                return McpFailed("its answer cannot be read", PARSE)
            if isinstance(leaf, MCPError):
                return McpFailed(leaf.message[:_LONGEST_MESSAGE].rstrip("."), leaf.code)
            if isinstance(leaf, httpx2.HTTPError):
                return McpFailed("it cannot be reached, or broke off", CLOSED)
        return McpFailed("its answers are not as the protocol says", INVALID)

    @asynccontextmanager
    async def _open(self) -> "AsyncIterator[Client]":
        import httpx2
        from mcp import Client
        from mcp.client.streamable_http import streamable_http_client

        async def bound(response: httpx2.Response) -> None:
            if response.status_code >= 400:
                self._status = response.status_code
            if response.headers.get("content-encoding", "identity") != "identity":
                self._too_large = True  # nobody asked for it, and a few bytes may become many
                raise _TooLarge
            response.stream = _bounded(response.stream, self._exceeded)

        self._status, self._too_large = None, False
        limit = httpx2.Timeout(self._server.seconds)
        hooks = {"response": [bound]}
        headers = {"accept-encoding": "identity", **self._server.headers}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=limit, event_hooks=hooks, max_redirects=0) as http,
            Client(
                streamable_http_client(self._server.url, http_client=http, max_sse_event_size=MOST_BYTES),
                cache=None,
            ) as client,
        ):
            yield client

    def _exceeded(self) -> None:
        self._too_large = True


def load_library() -> None:
    """Import what sessions need. It takes a second, which no request should wait for."""
    import mcp.client.streamable_http  # noqa: F401  # loaded, and used later


@asynccontextmanager
async def session(server: McpServer) -> AsyncIterator[McpSession]:
    """A session with a server while the block runs. It is opened when it is first asked."""
    async with background_tasks() as tasks:
        opened = McpSession(server)
        tasks.start_soon(opened.run)
        try:
            yield opened
            await opened.close()
        finally:
            opened.abandon()


def _bounded(stream: Any, exceeded: Callable[[], None]) -> Any:
    """The stream of an answer, which ends with an error when it is too long."""
    import httpx2

    class Bounded(httpx2.AsyncByteStream):  # type: ignore[misc]  # the library may be absent
        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for piece in stream:
                size += len(piece)
                if size > MOST_BYTES:
                    exceeded()
                    raise httpx2.StreamError("the answer is too large")
                yield piece

        async def aclose(self) -> None:
            await stream.aclose()

    return Bounded()


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


async def _called(client: "Client", name: str, arguments: dict[str, Any]) -> "CallToolResult":
    """What a call answers, as it is: the library's own call would check it against the server's schema on the
    event loop, where an expression of that schema could take for ever."""
    from mcp import MCPError
    from mcp_types import HEADER_MISMATCH, CallToolRequest, CallToolRequestParams, CallToolResult

    request = CallToolRequest(params=CallToolRequestParams(name=name, arguments=arguments))
    try:
        return await client.session.send_request(request, CallToolResult)
    except MCPError as error:
        if error.code != HEADER_MISMATCH:
            raise
    await client.list_tools()  # it says which arguments are headers, too
    return await client.session.send_request(request, CallToolResult)


def _text(result: "CallToolResult") -> str:
    """What a tool answered, as text. What is no text is named."""
    if not result.content and result.structured_content is not None:
        return msgspec.json.encode(result.structured_content).decode()
    return "\n".join(map(_block_text, result.content))


def _block_text(block: "ContentBlock") -> str:
    match block.type:
        case "text":
            return str(block.text)
        case "image" | "audio":
            return f"[{block.type}: {block.mime_type}, which this model does not read]"
        case "resource_link":
            return f"[{block.name}: {block.uri}]"
    text = getattr(block.resource, "text", None)
    return f"[{block.resource.uri}: not text]" if text is None else str(text)
