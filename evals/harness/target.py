"""What is evaluated: a server at a URL, or an engine in this process. Both take the bodies of OpenAI's API.

Errors are raised as the class of `personae.errors` that our server would send.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import anyio
import httpx
import msgspec

from personae.api import sse
from personae.api.bundled import bundled
from personae.api.commands.remote import server_root
from personae.api.library import Engine
from personae.api.library import open as open_library
from personae.errors import (
    GrammarError,
    NotFound,
    Overloaded,
    PersonaeError,
    RateLimited,
    RequestError,
    RequestFailed,
    UnsupportedParameter,
)

Body = dict[str, Any]
_BY_CODE: dict[str, type[RequestError]] = {
    "invalid_schema": GrammarError,
    "unsupported_parameter": UnsupportedParameter,
    "model_not_found": NotFound,
}


class TargetModel(msgspec.Struct, frozen=True):
    """A model's name; it is a base or an adapter."""

    name: str
    base: bool


class Source(msgspec.Struct, frozen=True):
    """A model folder, and folders of adapters by name."""

    model: Path
    adapters: dict[str, Path]


class Target(Protocol):
    """Something that answers requests."""

    url: str | None
    """Its URL, if it is reached over HTTP."""
    about: str
    """The text for the report's head."""
    source: "Source | None"
    """The loaded folders, if the engine is our own."""
    key: str | None
    """The server's API key."""

    async def models(self) -> list[TargetModel]:
        """The available models, bases first."""

    async def chat(self, body: Body) -> Body:
        """POST /v1/chat/completions."""

    async def complete(self, body: Body) -> Body:
        """POST /v1/completions."""

    def stream_chat(self, body: Body) -> AsyncIterator[Body]:
        """The chunks of a streamed chat completion."""


class Server:
    """An OpenAI-compatible server. `url` is its root, with or without `/v1`."""

    def __init__(self, client: httpx.AsyncClient, url: str, key: str | None = None) -> None:
        self._client = client
        self.url: str | None = url
        self.about = url
        self.source: Source | None = None
        self.key = key

    async def models(self) -> list[TargetModel]:
        """The models of /v1/models. An entry without `parent` is a base."""
        try:
            response = await self._client.get("/models")
        except httpx.TransportError as error:
            raise Overloaded(f"{self.url} cannot be reached: {error or type(error).__name__}.") from None
        cards = _checked(response)["data"]
        listed = [TargetModel(card["id"], not card.get("parent")) for card in cards]
        return sorted(listed, key=lambda model: not model.base)

    async def chat(self, body: Body) -> Body:
        """One answer."""
        return await self._post("/chat/completions", body)

    async def complete(self, body: Body) -> Body:
        """One answer."""
        return await self._post("/completions", body)

    async def stream_chat(self, body: Body) -> AsyncIterator[Body]:
        """Server-sent events as they arrive."""
        async with self._client.stream(
            "POST", "/chat/completions", json={**body, "stream": True}
        ) as response:
            if response.is_error:
                await response.aread()
                _checked(response)
            async for line in sse.async_lines(response):
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RequestFailed(str(event["error"].get("message", event["error"])))
                yield event

    async def _post(self, path: str, body: Body) -> Body:
        try:
            response = await self._client.post(path, json=body)
        except httpx.TimeoutException:
            raise RequestFailed("There was no answer in time.") from None
        except httpx.TransportError as error:
            raise Overloaded(f"{self.url} cannot be reached: {error or type(error).__name__}.") from None
        return _checked(response)


class InProcess:
    """An engine in this process, from `personae.open`."""

    url: str | None = None
    key: str | None = None

    def __init__(self, engine: Engine, about: str, source: Source) -> None:
        self._engine = engine
        self.about = about
        self.source: Source | None = source

    async def models(self) -> list[TargetModel]:
        """The base and its adapters."""
        first, *others = self._engine.models
        return [TargetModel(first, True), *(TargetModel(name, False) for name in others)]

    async def chat(self, body: Body) -> Body:
        """One answer."""
        answer: Body = msgspec.to_builtins(await self._engine.chat(**body))
        return answer

    async def complete(self, body: Body) -> Body:
        """One answer."""
        answer: Body = msgspec.to_builtins(await self._engine.complete(**body))
        return answer

    async def stream_chat(self, body: Body) -> AsyncIterator[Body]:
        """Chunks as they arrive."""
        async with self._engine.stream_chat(**body) as chunks:
            async for chunk in chunks:
                yield msgspec.to_builtins(chunk)


@asynccontextmanager
async def open_server(url: str, key: str | None = None, patience: float = 600.0) -> AsyncIterator[Server]:
    """The server at `url` with `key`. An answer may take `patience` seconds."""
    root = server_root(url)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=f"{root}/v1", headers=headers, timeout=httpx.Timeout(patience, connect=10.0), limits=limits
    ) as client:
        yield Server(client, root, key)


@asynccontextmanager
async def open_in_process(
    model: Path | None, adapters: tuple[Path, ...] = (), **options: Any
) -> AsyncIterator[InProcess]:
    """Our own engine. Raises LoadError."""
    async with open_library(model, adapters=adapters, **options) as engine:
        about = f"in process: {model.name if model else engine.models[0]}"
        yield InProcess(engine, about, source_of(model, adapters))


def source_of(model: Path | None, adapters: tuple[Path, ...]) -> Source:
    """What our own engine loads for these options."""
    if (ours := bundled(model)) is not None:
        model, adapters = ours.model, (*ours.adapters, *adapters)
    assert model is not None
    found = (path for folder in adapters if folder.is_dir() for path in sorted(folder.iterdir()))
    named = {path.name: path for path in found if path.is_dir()}
    return Source(model, named)


def names_of(model: Path | None, adapters: tuple[Path, ...]) -> list[str]:
    """The names of the models that our own engine will have, the base first."""
    ours = bundled(model)
    base = ours.name if ours is not None else str(model)
    return [base, *source_of(model, adapters).adapters]


@asynccontextmanager
async def closing(chunks: AsyncIterator[Body]) -> AsyncIterator[AsyncIterator[Body]]:
    """The stream for a `with` block, which closes it."""
    try:
        yield chunks
    finally:
        with anyio.CancelScope(shield=True):
            await chunks.aclose()  # type: ignore[attr-defined]  # both are generators


def _checked(response: httpx.Response) -> Body:
    """The body, unless it is an error, which is raised."""
    if response.is_success:
        body: Body = response.json()
        return body
    try:
        error = response.json()["error"]
        message, code, param = str(error["message"]), error.get("code"), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code, param = f"HTTP {response.status_code}: {response.text[:200]}", None, None
    raise _error(response.status_code, code)(
        message, code=code, param=param, retry_after=_seconds(response.headers.get("retry-after"))
    )


def _error(status: int, code: str | None) -> type[PersonaeError]:
    if status == RateLimited.status:
        return RateLimited
    if status in (502, 503, 504):
        return Overloaded
    if status >= 500:
        return RequestFailed
    return _BY_CODE.get(code or "", RequestError)


def _seconds(header: str | None) -> float | None:
    try:
        return None if header is None else float(header)
    except ValueError:
        return None  # a date; the class has a default
