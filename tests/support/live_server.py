"""The real server on a loopback port, in a thread of its own."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import Any

from patience import PATIENCE, eventually
from starlette.types import ASGIApp

from personae.api.http.address import bind, url
from personae.api.http.server import HttpServer
from personae.api.settings import ApiSettings


@contextmanager
def serving(
    app: ASGIApp,
    settings: ApiSettings | None = None,
    around: AbstractAsyncContextManager[Any] | None = None,
    stop: bool = False,
    **kwargs: Any,
) -> Iterator[str]:
    """Serve `app` while the block runs, within `around` on the server's loop. Yields its URL. With `stop` the
    server is stopped as by SIGTERM at the end, else without a drain."""
    listening = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    listener = bind("127.0.0.1", 0)
    server = HttpServer(app, settings or ApiSettings(), on_ready=listening.set, **kwargs)
    address = url(listener)

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        async with around or nullcontext():
            await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    try:
        eventually(lambda: listening.is_set() or not thread.is_alive(), "the server starts")
        assert listening.is_set(), "the server did not start"
        yield address
    finally:
        if stop:
            loops[0].call_soon_threadsafe(server.stop)
        else:
            server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the server did not stop"
