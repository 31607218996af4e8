"""An HTTP worker: one of the processes that accept connections.

    python -m personae.api.http_workers.worker LINE LISTENER

The arguments are file descriptors: the line to the main process, and a socket that listens. A worker parses
requests, renders templates, encodes prompts, decodes answers and writes them. It holds no state that outlives
a request, imports no torch, and ends when its line closes.
"""

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import anyio
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from personae.actors.framing import receive_first
from personae.actors.kit.event_loop import loop_options
from personae.actors.kit.gc_tuning import spare_what_is_here
from personae.actors.kit.switch_interval import shorten_switch_interval
from personae.actors.options import salts_of
from personae.api import routes
from personae.api.anthropic import routes as anthropic
from personae.api.app import app_of, make_context
from personae.api.chat import chat_completions
from personae.api.completions import completions
from personae.api.embeddings import routes as embeddings
from personae.api.http.middleware import without_prefix
from personae.api.http.server import HttpServer
from personae.api.http_workers import messages as wire
from personae.api.http_workers.forwarded import Forwarder
from personae.api.http_workers.line import Line
from personae.api.http_workers.remote import (
    RemoteAccess,
    RemoteBodies,
    RemoteClient,
    RemoteMeter,
    RemoteResponses,
    RemoteUsage,
    find_model,
)
from personae.api.responses import routes as responses
from personae.api.telemetry import logs
from personae.api.telemetry.tracing import UNTRACED, Tracing, tracing_to
from personae.engine.tokens import Tokenizer

logger = logging.getLogger(__name__)

OWN = (
    chat_completions,
    completions,
    embeddings.create_embeddings,
    embeddings.score,
    embeddings.rerank,
    responses.create_response,
    anthropic.create_message,
    anthropic.count_tokens,
    routes.tokenize,
    routes.detokenize,
)
"""The routes that a worker serves itself, because they read and write text. It passes all other routes on."""

_REPORT_SECONDS = 1.0


class Worker:
    """The ASGI app of a worker, and its end of the line."""

    def __init__(self, begin: wire.Begin, tokenizer: Tokenizer, tracing: Tracing = UNTRACED) -> None:
        self._line: Line | None = None
        self._client = RemoteClient(
            self.line, tokenizer, begin.models, begin.max_model_len, begin.vocab_size, salts_of(begin.secret)
        )
        context = make_context(
            self._client,
            begin.settings,
            tracing=tracing,
            usage=RemoteUsage(),
            stored=RemoteResponses() if begin.stores else None,
        )
        self._increments = context.metrics.increments()
        context = replace(context, meter=RemoteMeter(), bodies=RemoteBodies(), lookup=find_model)
        self._forwarder = Forwarder()
        self.app: ASGIApp = _Split(
            app_of(context, OWN, Middleware(RemoteAccess, line=self.line)),
            self._forwarder,
            begin.settings.root_path,
        )
        self.end_all = self._client.end_all
        self.on_drain: Callable[[], None] = lambda: None
        self.on_closed: Callable[[], None] = lambda: None

    def connect(self, connection: socket.socket) -> None:
        """Talk to the main process over a connected socket, from now on and on this event loop."""
        self._line = self._forwarder.line = Line(connection, wire.ToWorker, self._receive, self._closed)

    def line(self) -> Line:
        """The line, once there is one."""
        assert self._line is not None, "the worker is connected before it listens"
        return self._line

    def report(self) -> None:
        """Tell the main process what was counted."""
        self.line().tell(wire.Increments(self._increments.take()))

    def _receive(self, message: Any) -> None:
        match message:
            case wire.Deltas():
                self._client.deliver(message)
            case wire.StreamFailed(ids=ids, failure=failure):
                self._client.fail(ids, failure.error())
            case wire.Report():
                self.report()
            case wire.Drain():
                self.on_drain()
            case _:
                self._forwarder.take(message)

    def _closed(self) -> None:
        self._forwarder.close()
        self.on_closed()


class _Split:
    """Gives each request to the worker's own app, or passes it on."""

    def __init__(self, own: ASGIApp, others: ASGIApp, prefix: str) -> None:
        self._own = own
        self._others = others
        self._prefix = prefix
        self._paths = {(each.method, each.path) for each in OWN}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        path = (scope["method"], without_prefix(scope["path"], self._prefix))
        await (self._own if path in self._paths else self._others)(scope, receive, send)


async def serve(connection: socket.socket, listener: socket.socket, begin: wire.Begin) -> None:
    """Serve until the main process says to stop."""
    tokenizer = await anyio.to_thread.run_sync(Tokenizer.load, begin.model)
    with ExitStack() as stack:
        tracing, traced = stack.enter_context(tracing_to(begin.settings.otlp_traces_endpoint))
        worker = Worker(begin, tokenizer, tracing)
        worker.connect(connection)

        def on_ready() -> None:
            spare_what_is_here()
            shorten_switch_interval()
            worker.line().tell(wire.Serving())

        server = HttpServer(
            traced(worker.app),
            begin.settings,
            drain_seconds=begin.settings.drain_timeout,
            on_ready=on_ready,
            end_all=worker.end_all,
            signals=(signal.SIGTERM,),
        )
        worker.on_drain = lambda: None if server.draining else server.stop()
        worker.on_closed = _end  # nothing can be answered any more
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_reports, worker)
            await server.serve(sockets=[listener])
            tasks.cancel_scope.cancel()
        worker.report()
        await worker.line().flush()


async def _reports(worker: Worker) -> None:
    while True:
        await anyio.sleep(_REPORT_SECONDS)
        worker.report()


def _end() -> None:
    logging.shutdown()
    os._exit(0)


def main() -> None:
    """Run a worker."""
    for number in (signal.SIGINT, signal.SIGUSR1):  # a terminal sends it to all: the main process handles it
        signal.signal(number, signal.SIG_IGN)
    connection, listener = (socket.socket(fileno=int(file)) for file in sys.argv[1:3])
    for each in (connection, listener):
        each.set_inheritable(False)
    try:
        begin: wire.Begin = receive_first(connection, wire.Begin)
    except (EOFError, ConnectionResetError):
        return  # the main process has ended
    logs.configure(begin.settings.log_format)
    anyio.run(serve, connection, listener, begin, backend_options=loop_options())


if __name__ == "__main__":
    main()
