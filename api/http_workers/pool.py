"""Starts the HTTP workers, starts them again when they end, and stops them in order.

Each worker has a listening socket of its own on the same address (SO_REUSEPORT), and the kernel spreads new
connections over them. The sockets belong to the main process. So while a worker is started again, connections
wait in its socket instead of being refused.
"""

import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import anyio
from anyio import open_process
from anyio.abc import Process, TaskGroup
from starlette.applications import Starlette

from personae.actors.frontend.frontend import LocalClient
from personae.actors.kit.child import Intensity
from personae.api.context import RequestContext
from personae.api.http_workers.connection import Connection
from personae.api.http_workers.messages import Begin, Drain
from personae.api.opened import Opened
from personae.api.tenants.access import Access
from personae.api.tenants.data import DataDir
from personae.api.tenants.store import DEFAULT_TENANT
from personae.errors import EngineLost, LoadError, Overloaded, PersonaeError

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "personae.api.http_workers.worker")
_MOST_RESTARTS, _WITHIN_SECONDS = 5, 60.0
_REPORT_SECONDS = 1.0
_LAST_SECONDS = 5.0  # after the drain's time, until a worker is ended

Connect = Callable[[socket.socket, TaskGroup], Connection]


class HttpWorkers:
    """The workers of a server. `connect` makes the main process's side of one of them.

    `begin` is what every worker knows. When the workers drain for longer than its `drain_timeout`, `end_all`
    ends what still runs. On SIGUSR1 the result of `describe` is printed.
    """

    def __init__(
        self,
        begin: Begin,
        connect: Connect,
        *,
        on_ready: Callable[[], None] = lambda: None,
        end_all: Callable[[PersonaeError], None] = lambda error: None,
        describe: Callable[[], str] = str,
        command: Sequence[str] = (),
    ) -> None:
        self._sockets: list[socket.socket] = []
        self._begin = begin
        self._connect = connect
        self._on_ready = on_ready
        self._end_all = end_all
        self._describe = describe
        self._command = command or COMMAND
        self._connections: dict[int, Connection] = {}
        self._processes: dict[int, Process] = {}
        self._intensity = Intensity(_MOST_RESTARTS, _WITHIN_SECONDS)
        self._stopping = anyio.Event()
        self._not_ready = 0
        self._failure: PersonaeError | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `stop` or a signal, with a worker for each socket. Raises LoadError if the workers
        cannot start, EngineLost if they end again and again."""
        self._sockets = sockets or []
        self._not_ready = len(self._sockets)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._signals)
            async with anyio.create_task_group() as workers:
                for index in range(len(self._sockets)):
                    workers.start_soon(self._keep, index, tasks)
            tasks.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Let what runs finish, and stop. When called again, stop at once."""
        if self._stopping.is_set():
            for process in self._processes.values():
                _kill(process)
            return
        self._stopping.set()
        if running := sum(each.held for each in self._connections.values()):
            seconds = self._begin.settings.drain_timeout
            logger.info("stopping: %d requests run, up to %g s for that", running, seconds)
        for connection in self._connections.values():
            connection.line.tell(Drain())

    async def gather(self) -> None:
        """Wait until what the workers have counted is here."""
        with anyio.move_on_after(_REPORT_SECONDS):
            async with anyio.create_task_group() as tasks:
                for connection in tuple(self._connections.values()):
                    tasks.start_soon(connection.report)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [process.pid for process in self._processes.values()]

    async def _signals(self) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1) as signals:
            async for number in signals:
                if number == signal.SIGUSR1:
                    print(self._describe(), file=sys.stderr, flush=True)  # noqa: T201  the answer to the signal
                else:
                    self.stop()

    async def _keep(self, index: int, tasks: TaskGroup) -> None:
        """Run a worker, and another one when it ends."""
        while not self._stopping.is_set():
            code, served = await self._run(index, tasks)
            if self._stopping.is_set():
                self._sockets[index].close()  # nobody would accept
                return
            if not served and self._not_ready:
                self._fail(LoadError(f"An HTTP worker ended with code {code} before it served."))
            elif not self._intensity.allows(anyio.current_time()):
                self._fail(EngineLost("The HTTP workers ended too often and were not started again."))
            else:
                logger.error("HTTP worker %d ended with code %d; another takes its place", index, code)

    def _fail(self, failure: PersonaeError) -> None:
        self._failure = self._failure or failure
        self.stop()

    async def _run(self, index: int, tasks: TaskGroup) -> tuple[int, bool]:
        """Run one worker until it ends. Returns its exit code, and whether it has served."""
        ours, theirs = socket.socketpair()
        with theirs:
            files = (theirs.fileno(), self._sockets[index].fileno())
            process = await open_process(
                [*self._command, *map(str, files)],
                stdin=subprocess.DEVNULL,
                stdout=None,
                stderr=None,
                pass_fds=files,
            )
        self._processes[index] = process
        self._connections[index] = connection = self._connect(ours, tasks)
        connection.line.tell(self._begin)
        try:
            async with anyio.create_task_group() as watch:
                watch.start_soon(self._watch, connection)
                watch.start_soon(self._end_in_time, process)
                code = await process.wait()
                watch.cancel_scope.cancel()
        finally:
            _kill(process)
            del self._connections[index], self._processes[index]
            with anyio.move_on_after(_LAST_SECONDS, shield=True):
                await connection.closed.wait()  # what it has sent before its end is read first
            connection.line.close()
        return code, connection.serving.is_set()

    async def _watch(self, connection: Connection) -> None:
        """Wait until it serves."""
        await connection.serving.wait()
        if self._stopping.is_set():
            connection.line.tell(Drain())
        if self._not_ready:
            self._not_ready -= 1
            if not self._not_ready:
                self._on_ready()

    async def _end_in_time(self, process: Process) -> None:
        """When the server stops, end what takes too long."""
        await self._stopping.wait()
        await anyio.sleep(self._begin.settings.drain_timeout)
        self._end_all(Overloaded("The server is stopping and could not wait for the end of this answer."))
        await anyio.sleep(_LAST_SECONDS)
        _kill(process)


def _kill(process: Process) -> None:
    if process.returncode is None:
        process.kill()


def http_workers(
    app: Starlette, opened: Opened, data: DataDir, on_ready: Callable[[], None], *, stores: bool
) -> HttpWorkers:
    """The workers for an app that is served by this process. `stores`: responses are stored."""
    context: RequestContext = app.state.context
    client = opened.client
    assert isinstance(client, LocalClient), "an open engine has the actors of this process"
    assert opened.model is not None, "the engine was loaded from somewhere"
    settings = context.settings
    begin = Begin(
        replace(settings, api_key=None),
        opened.model,
        data.secret,
        dict(client.models(DEFAULT_TENANT)),
        client.max_model_len,
        client.vocab_size,
        stores,
    )
    access = Access(
        app,
        store=context.tenants,
        usage=context.usage,
        meter=context.meter,
        insecure=settings.insecure_no_auth,
        origins=settings.allowed_origin,
    )

    def connect(connection: socket.socket, tasks: TaskGroup) -> Connection:
        return Connection(connection, context, client, access, app, tasks)

    workers = HttpWorkers(begin, connect, on_ready=on_ready, end_all=opened.end_all, describe=opened.describe)
    context.metrics.gather = workers.gather
    return workers
