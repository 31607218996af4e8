"""Personae inside a Python program: the same requests and answers as over HTTP, without the server.

    async with personae.open("models/llama", adapters=["adapters"]) as engine:
        answer = await engine.chat([{"role": "user", "content": "Hello!"}], model="poet", max_tokens=64)
        print(answer.choices[0].message.content)

The fields, their ranges and the errors are those of docs/guide/api.md; an error is raised as the class of
`personae.errors` that the server would have sent. `response_format` may also be a Python type: a pydantic
model, a dataclass, a TypedDict, a Literal, an Enum, or a term of `outlines.types` (python_types.py).
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec

from personae.actors.client import EngineStats
from personae.api.answering import known_models
from personae.api.chat import admit as admit_chat
from personae.api.choices import Part
from personae.api.completions import admit as admit_completion
from personae.api.exchange import Exchange
from personae.api.generation import Job
from personae.api.local import open_engine
from personae.api.opened import serve_settings
from personae.api.options import ServeOptions, checked
from personae.api.python_types import with_types
from personae.api.services import Services, make_services
from personae.api.stream import AnswerBuilder
from personae.api.tenants.access import LOCAL_ADMIN, Caller
from personae.api.wire.answers import ChatChunk, ChatCompletion, Completion
from personae.api.wire.decode import decode
from personae.api.wire.schema import ChatRequest, CompletionRequest
from personae.errors import LoadError, UnsupportedParameter


class Engine:
    """An open engine. Any number of tasks may use it at the same time; their requests share batches."""

    def __init__(self, services: Services) -> None:
        self._services = services

    @property
    def models(self) -> tuple[str, ...]:
        """The names that `model` may have, the base first."""
        return tuple(card.name for card in known_models(Exchange(self._services)))

    def stats(self) -> EngineStats:
        """What the engine is doing, and its counters: what `/metrics` shows."""
        return self._services.client.stats()

    async def chat(self, messages: Sequence[dict[str, Any]], **fields: Any) -> ChatCompletion:
        """Answer a conversation. `fields` are those of `/v1/chat/completions`; `model` is the base by
        default."""
        _check_whole(fields)
        with self._asked({"messages": messages, **fields}, ChatRequest) as (exchange, body):
            job, form = await admit_chat(exchange, body)
            return form.whole(await job.gather(_never))

    async def complete(self, prompt: str | Sequence[Any], **fields: Any) -> Completion:
        """Continue a prompt. `fields` are those of `/v1/completions`; `model` is the base by default."""
        _check_whole(fields)
        with self._asked({"prompt": prompt, **fields}, CompletionRequest) as (exchange, body):
            job, form = await admit_completion(exchange, body)
            return form.whole(await job.gather(_never))

    @asynccontextmanager
    async def stream_chat(
        self, messages: Sequence[dict[str, Any]], **fields: Any
    ) -> AsyncIterator[AsyncIterator[ChatChunk]]:
        """As `chat`, in chunks: `async with ... as chunks:`, and inside `async for chunk in chunks:`.

        Leaving the block ends the request.
        """
        with self._asked({"messages": messages, **fields, "stream": True}, ChatRequest) as (exchange, body):
            job, form = await admit_chat(exchange, body)
            async with _streamed(job, form) as chunks:
                yield chunks

    @contextmanager
    def _asked(self, fields: dict[str, Any], type: type[Any]) -> Iterator[tuple[Exchange, Any]]:
        # The fields go through JSON, so that they mean exactly what they mean on the wire.
        body = msgspec.json.encode({"model": self.models[0], **with_types(fields)})
        caller = Caller(LOCAL_ADMIN)
        caller.body_size = len(body)
        settings = self._services.settings
        asked = decode(body, type, settings.max_json_depth, unknown=settings.unknown_fields)
        with caller.until_done:
            yield Exchange(self._services, caller), asked


@asynccontextmanager
async def open(
    model: str | Path | ServeOptions | None = None,
    *,
    on_progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> AsyncIterator[Engine]:
    """Open an engine; without a model SmolLM2-135M-Instruct. `options` are those of `personae serve`.

    model: a Hugging Face model folder, a GGUF file, or "demo" for the small synthetic one; or all options as
    one `ServeOptions`. adapters: one folder or several, whose sub-folders are adapters. By default the engine
    runs with `one_process`. `on_progress(done, total)` gets the bytes loaded, in another thread. Raises
    LoadError, and TypeError for an unknown option.
    """
    if not isinstance(model, ServeOptions):
        folder = model if model is None else Path(model)
        model = ServeOptions(folder, **{"one_process": True, **options})
    elif options:
        raise TypeError("The options are in ServeOptions already; give no others.")
    try:
        serve = checked(model)
    except ValueError as error:
        raise LoadError(f"An option is wrong: {error}") from None

    def weights(phase: str, done: int, total: int) -> None:
        if on_progress is not None and phase == "weights" and total:
            on_progress(done, total)

    async with open_engine(serve, weights) as opened:
        yield Engine(make_services(opened.client, serve_settings(serve, opened)))


def _check_whole(fields: dict[str, Any]) -> None:
    """Raises UnsupportedParameter if the answer would come in chunks."""
    if fields.get("stream"):
        raise UnsupportedParameter(
            "`stream` is not served here; `stream_chat` brings chunks.", param="stream"
        )


@asynccontextmanager
async def _streamed(job: Job, form: AnswerBuilder) -> AsyncIterator[AsyncIterator[Any]]:
    """Run the job in a task of its own while the block iterates over its chunks."""
    send, receive = anyio.create_memory_object_stream[Part](float("inf"))  # bounded by max_tokens

    async def run() -> None:
        with send:
            await job.run(send.send_nowait)

    async def iterate() -> AsyncGenerator[Any]:
        async for part in receive:
            for chunk in form.of(part):
                yield chunk
        for chunk in form.last():
            yield chunk

    failure: Exception | None = None
    with receive:
        async with anyio.create_task_group() as tasks:

            async def guarded() -> None:
                nonlocal failure
                try:
                    await run()
                except Exception as error:
                    failure = error

            tasks.start_soon(guarded)
            iterator = iterate()
            try:
                yield iterator
            finally:
                await iterator.aclose()
                tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _never() -> dict[str, Any]:
    """A library call has no connection that could close."""
    await anyio.sleep_forever()
    raise AssertionError
