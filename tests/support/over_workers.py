"""The API as two HTTP workers serve it, in one process: every request goes through a worker and its line.

With PERSONAE_TEST_HTTP_WORKERS set, `create_app` makes apps of this kind, so that tests of the API run over
workers (tests/api/http_workers/test_over_workers.py).
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

import personae.api.app
from personae.actors.client import EngineClient
from personae.actors.frontend.inbox import Inbox
from personae.api.context import RequestContext
from personae.api.http_workers.connection import Connection
from personae.api.http_workers.messages import Begin
from personae.api.http_workers.worker import Worker
from personae.api.settings import ApiSettings
from personae.api.tenants.access import Access
from personae.engine.sequence import SequenceLog
from personae.errors import PersonaeError


class Tasks:
    """Starts tasks that outlive the test's own; they end with its event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start_soon(self, work: Callable[..., Any], *arguments: Any) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work(*arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class Submitted:
    """Runs submissions of any engine, each in a task of its own."""

    def __init__(self, engine: EngineClient, tasks: Tasks) -> None:
        self._engine = engine
        self._tasks = tasks
        self._running: dict[str, tuple[asyncio.Task[None], Any, set[str]]] = {}

    async def submit(self, logs: Sequence[SequenceLog], inbox: Inbox) -> None:
        entered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        live = {log.id for log in logs}

        async def run() -> None:
            try:
                async with self._engine.stream(logs) as stream:
                    for id in live:
                        self._running[id] = (task, stream, live)
                    entered.set_result(None)
                    async for delta in stream:
                        if delta.id in live:
                            inbox.put(delta)
            except PersonaeError as error:
                if entered.done():
                    inbox.fail(error)
                else:
                    entered.set_exception(error)
            finally:
                for log in logs:
                    self._running.pop(log.id, None)

        task = self._tasks.start_soon(run)
        await entered

    def withdraw(self, ids: Sequence[str]) -> None:
        for id in ids:
            if id in self._running:
                task, stream, live = self._running[id]
                stream.stop(id)
                live.discard(id)
                if not live:
                    task.cancel()


class OverWorkers:
    """An ASGI app that has two workers serve `app`, in turns."""

    def __init__(self, app: Starlette, access: dict[str, Any]) -> None:
        self.app = app
        self.state = app.state
        self._access = access
        self._workers: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.connections: list[Connection] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.app, name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._loop is not asyncio.get_running_loop():
            self._loop = asyncio.get_running_loop()
            self._workers = cycle([self._worker() for _ in range(2)])
            self.state.context.metrics.gather = self._gather
        await next(self._workers).app(scope, receive, send)

    async def _gather(self) -> None:
        for connection in self.connections:
            await connection.report()

    def _worker(self) -> Worker:
        context: RequestContext = self.state.context
        engine, tasks = context.client, Tasks()
        begin = Begin(
            context.settings,
            personae.__path__[0],
            b"",
            dict(engine.models("default")),
            engine.max_model_len,
            engine.vocab_size,
            context.responses is not None,
        )
        worker = Worker(begin, engine.tokenizer, context.tracing)
        worker._client.salt = engine.salt  # a fake engine has salts of its own
        ours, theirs = socket.socketpair()
        access = Access(self.app, meter=context.meter, **self._access)
        submitted = engine if hasattr(engine, "submit") else Submitted(engine, tasks)
        self.connections.append(Connection(ours, context, submitted, access, self.app, tasks))
        worker.connect(theirs)
        _open.extend((asyncio.get_running_loop(), line) for line in (ours, theirs))
        return worker


_open: list[tuple[asyncio.AbstractEventLoop, socket.socket]] = []


def close_ended() -> None:
    """Close the lines whose event loop has ended."""
    for loop, line in tuple(_open):
        if loop.is_closed():
            _open.remove((loop, line))
            line.close()


def make_over_workers() -> None:
    """Let `create_app` make such apps from now on."""
    made = personae.api.app.create_app

    def create_app(client: EngineClient, settings: ApiSettings | None = None, **parts: Any) -> OverWorkers:
        app = made(client, settings, **parts)
        settings = settings or ApiSettings()
        return OverWorkers(
            app,
            {
                "store": parts.get("tenants"),
                "usage": parts.get("usage"),
                "insecure": settings.insecure_no_auth,
                "origins": settings.allowed_origin,
            },
        )

    personae.api.app.create_app = create_app
