"""A client that streams one request to an OpenAI-compatible server and uses very little processor time.

A streamed event counts when its bytes arrive. Tokens are those of the answer's `usage`.
"""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from personae.errors import RequestError, Unauthorized

_LONGEST = 2**20  # bytes of a header line


@dataclass(frozen=True, slots=True)
class Request:
    """A request to send. `tenant` and `kind` are names for the report. The client disconnects after
    `leave_after` events."""

    path: str
    body: dict[str, Any]
    key: str | None = None
    tenant: str = ""
    kind: str = "free"
    leave_after: int | None = None


@dataclass(slots=True)
class Answer:
    """The result of a request. Times in seconds: `sent` is on `time.perf_counter`'s clock, `first` and
    `seconds` count from there. `gaps` are the times between events with content. `counts` are the tokens so
    far at each of these, if every event has usage (`continuous_usage_stats`)."""

    request: Request
    sent: float
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first: float | None = None
    seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    error: str | None = None
    left: bool = False

    @property
    def complete(self) -> bool:
        """Whether the answer came to its end."""
        return self.error is None and not self.left


async def ask(url: str, request: Request) -> Answer:
    """Send the request and read the answer to its end, or until the client disconnects. Errors are in the
    answer."""
    answer = Answer(request, time.perf_counter())
    try:
        await _read(url, request, answer)
    except (OSError, ValueError, EOFError) as error:
        answer.error = f"connection: {type(error).__name__}"
    finally:
        answer.seconds = time.perf_counter() - answer.sent
    return answer


async def _read(url: str, request: Request, answer: Answer) -> None:
    where = urlsplit(url)
    options = {**request.body.get("stream_options", {}), "include_usage": True}
    body = {**request.body, "stream": True, "stream_options": options}
    reader, writer = await _connect(url)
    try:
        writer.write(_head("POST", where.path + request.path, where.netloc, request.key, json.dumps(body)))
        status, headers = await _answer_head(reader)
        if status != 200:
            answer.error = f"status {status}{await _code(reader, headers)}"
            return
        last, events = answer.sent, 0
        async for line in _lines(reader, headers):
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter()
            event = json.loads(line[6:])
            if "error" in event:
                answer.error = f"stream: {event['error'].get('code') or event['error'].get('type')}"
                return
            if usage := event.get("usage"):
                answer.tokens = usage["completion_tokens"]
                answer.prompt_tokens = usage["prompt_tokens"]
                answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            if not _says_something(event):
                continue
            if answer.first is None:
                answer.first = now - answer.sent
            else:
                answer.gaps.append(now - last)
            answer.counts.append(answer.tokens)
            last, events = now, events + 1
            if events == request.leave_after:
                answer.left = True
                return
        if answer.first is None and not answer.tokens:
            answer.error = "stream: nothing came"
    finally:
        writer.close()


async def get_json(url: str, path: str, key: str | None = None) -> Any:
    """A GET. Raises RequestError if there is no server or it refuses."""
    where = urlsplit(url)
    try:
        reader, writer = await _connect(url)
    except OSError as error:
        raise RequestError(f"There is no server at {url}: {error}.") from None
    try:
        writer.write(_head("GET", where.path + path, where.netloc, key))
        status, headers = await _answer_head(reader)
        text = b"\n".join([line async for line in _lines(reader, headers)])
    finally:
        writer.close()
    if status == Unauthorized.status:
        raise RequestError(f"{url} wants an API key: give one as PERSONAE_API_KEY, or with --key.")
    if status != 200:
        raise RequestError(f"{url}{path} answers with status {status}.")
    return json.loads(text)


async def _code(reader: asyncio.StreamReader, headers: dict[str, str]) -> str:
    """A refusal's `code` in brackets; empty if it has none."""
    text = b"".join([line async for line in _lines(reader, headers)])
    try:
        code = json.loads(text)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return ""
    return f" ({code})" if isinstance(code, str) else ""


def _says_something(event: dict[str, Any]) -> bool:
    """Whether an event has text, reasoning or a part of a tool call."""
    for choice in event.get("choices") or ():
        if choice.get("text"):
            return True
        delta = choice.get("delta") or {}
        if any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")):
            return True
    return False


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    where = urlsplit(url)
    secure = where.scheme == "https"
    port = where.port or (443 if secure else 80)
    context = ssl.create_default_context() if secure else None
    return await asyncio.open_connection(where.hostname, port, limit=_LONGEST, ssl=context)


def _head(method: str, path: str, host: str, key: str | None, body: str = "") -> bytes:
    payload = body.encode()
    head = f"{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
    if key:
        head += f"authorization: Bearer {key}\r\n"
    if payload:
        head += f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n"
    return f"{head}\r\n".encode() + payload


async def _answer_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status = (await reader.readline()).split()
    headers = {}
    while (line := (await reader.readline()).strip()) != b"":
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip().lower()
    if len(status) < 2:
        raise EOFError("no answer")
    return int(status[1]), headers


async def _lines(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The body's lines as they arrive, however they are split into chunks."""
    rest = b""
    async for piece in _pieces(reader, headers):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
    if rest:
        yield rest


async def _pieces(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
        return
    left = int(headers.get("content-length", -1))
    while left and (piece := await reader.read(2**16)):
        left -= len(piece)
        yield piece
