"""Runs the app under uvicorn, with uvloop and httptools, and stops it gracefully."""

import asyncio
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from personae.api.http.drain import DrainMiddleware
from personae.api.http.protocol import guarded
from personae.api.http.tls import Certificate
from personae.api.settings import ApiSettings
from personae.errors import LoadError, Overloaded, PersonaeError

logger = logging.getLogger(__name__)

_KEEP_ALIVE = 65
"""Seconds; longer than load balancers keep idle connections, so that they close first."""

_MOST_FILES = 65536
_OTHER_FILES = 96
"""Open files that are kept for what is no connection."""

_LAST_SECONDS = 2
"""Seconds that an answer has to be sent after it has ended."""


def allow_open_files() -> None:
    """Raise the limit on open files as far as this process may: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections() -> int:
    """How many connections there may be, so that files, databases and engines can still be opened."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    files = _MOST_FILES if files == resource.RLIM_INFINITY else min(files, _MOST_FILES)
    return max(1, files - max(_OTHER_FILES, files // 8))


class HttpServer(uvicorn.Server):
    """uvicorn's server. It calls `on_ready` once it listens. On SIGINT or SIGTERM it finishes what runs and
    stops.

    While it drains it is not ready and refuses requests. After `drain_seconds`, `end_all` ends unfinished
    answers with an error. A second signal stops at once. On SIGUSR1 it prints the result of `describe`.
    With a `certificate` it speaks TLS, and reads the files again on SIGHUP. Signals are not raised again
    after the server has stopped, so that the engine around it is closed in order.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ApiSettings,
        *,
        drain_seconds: float = 30,
        on_ready: Callable[[], None] = lambda: None,
        end_all: Callable[[PersonaeError], None] = lambda error: None,
        describe: Callable[[], str] = str,
        certificate: Certificate | None = None,
    ) -> None:
        self._certificate = certificate
        self._handshake_seconds = settings.header_seconds
        self._drain = DrainMiddleware(app, settings.root_path)
        self._drain_seconds = drain_seconds
        self._end_all = end_all
        self._describe = describe
        self._finishing: asyncio.Task[None] | None = None
        super().__init__(
            uvicorn.Config(
                self._drain,
                http=guarded(settings, most_connections()),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=_LAST_SECONDS,
            )
        )
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on `sockets`, then call `on_ready`."""
        await self.lifespan.startup()
        config = self.config
        protocol = partial(
            config.http_protocol_class,
            config=config,  # type: ignore[call-arg]  # uvicorn's own protocols take these
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        tls: dict[str, Any] = {}
        if self._certificate is not None:  # uvicorn has no limit on the time of a handshake
            tls = {"ssl": self._certificate.context, "ssl_handshake_timeout": self._handshake_seconds}
        create = partial(asyncio.get_running_loop().create_server, protocol, backlog=config.backlog, **tls)
        self.servers = [await create(sock=each) for each in sockets or ()]
        self.started = True
        self._on_ready()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle the signals while serving, where this is possible: in the main thread."""
        loop = asyncio.get_running_loop()
        taken = []
        handlers = {signal.SIGINT: self.stop, signal.SIGTERM: self.stop, signal.SIGUSR1: self._show}
        if self._certificate is not None:
            handlers[signal.SIGHUP] = self._reload
        for number, handler in handlers.items():
            try:
                loop.add_signal_handler(number, handler)
            except (ValueError, RuntimeError, NotImplementedError):
                break  # another thread, or Windows: a program that embeds the server there calls `stop`
            taken.append(number)
        try:
            yield
        finally:
            for number in taken:
                loop.remove_signal_handler(number)

    @property
    def draining(self) -> bool:
        """Whether the server is draining: it refuses new requests and finishes the running ones."""
        return self._drain.draining

    def _show(self) -> None:
        """Print what every actor is doing."""
        print(self._describe(), file=sys.stderr, flush=True)  # noqa: T201  the answer to the signal

    def _reload(self) -> None:
        """Read the certificate again."""
        assert self._certificate is not None
        try:
            self._certificate.reload()
        except LoadError as error:
            logger.error("the earlier certificate stays: %s", error.message)
        else:
            logger.info("the certificate was read again")

    def stop(self) -> None:
        """Finish what runs and stop. When called again, stop at once."""
        if self._drain.draining:
            self.force_exit = self.should_exit = True
            return
        self._drain.draining = True
        if running := self._drain.active:
            logger.info(
                "stopping: %d %s running, up to %g s for that; a second signal stops at once",
                running,
                "answer is" if running == 1 else "answers are",
                self._drain_seconds,
            )
        self._finishing = asyncio.get_running_loop().create_task(self._finish())

    async def _finish(self) -> None:
        try:
            await asyncio.wait_for(self._drain.idle(), self._drain_seconds)
        except TimeoutError:
            why = (
                "The server is stopping and could not wait for the end of this answer. Send the request "
                "again."
            )
            self._end_all(Overloaded(why, code="shutting_down"))
            self._drain.end()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._drain.idle(), _LAST_SECONDS)
        self.should_exit = True
