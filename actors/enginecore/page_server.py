"""Gives pages of this engine's prefix cache to other engines of the same server, by key.

Each listens on a Unix socket in a folder that only this user may enter. The scheduler keeps the pages from
eviction while they are sent. They are read and sent on worker threads while steps run: nobody writes to a
page that is in the prefix cache.
"""

import logging
import os
import socket
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec
from anyio import CapacityLimiter, to_thread

from personae.actors.kit.mailbox import Ref
from personae.actors.messages import HoldPages, LetGo, Message
from personae.engine.scheduling.running import HeldPages
from personae.engine.tiers.transfer import (
    PageSource,
    PagesWanted,
    receive_wanted,
    refuse_pages,
    send_pages,
)
from personae.errors import ActorCrashed, ActorStopped, Overloaded

MOST_AT_ONCE = 4  # fetchers that are served at the same time; others wait
BACKLOG = 64

log = logging.getLogger("personae.kv")


async def serve_pages(path: Path, source: PageSource, scheduler: Ref[Message]) -> None:
    """Serve until cancelled. Whatever a fetcher does ends only its own connection."""
    limiter, threads = CapacityLimiter(MOST_AT_ONCE), CapacityLimiter(MOST_AT_ONCE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            _listen(listener, path)
        except OSError as error:
            log.warning("this engine cannot give pages to others, they compute them: %s", error)
            return
        listener.setblocking(False)

        async def answer(connection: socket.socket) -> None:
            with connection:
                async with limiter:
                    await _answer(connection, source, scheduler, threads)

        async with anyio.create_task_group() as tasks:
            while True:
                await anyio.wait_readable(listener)
                with suppress(BlockingIOError, ConnectionAbortedError):
                    connection, _ = listener.accept()
                    connection.setblocking(True)
                    tasks.start_soon(answer, connection)


def _listen(listener: socket.socket, path: Path) -> None:
    """Listen at `path`. Raises OSError."""
    path.unlink(missing_ok=True)  # of an engine core that has ended
    listener.bind(str(path))
    os.chmod(path, 0o600)
    listener.listen(BACKLOG)


async def _answer(
    connection: socket.socket, source: PageSource, scheduler: Ref[Message], threads: CapacityLimiter
) -> None:
    """Serve one fetcher."""
    try:
        wanted: PagesWanted = await to_thread.run_sync(receive_wanted, connection, limiter=threads)
        if refusal := source.refusal(wanted):
            await to_thread.run_sync(refuse_pages, connection, refusal, limiter=threads)
            return
        held: HeldPages = await scheduler.ask(lambda reply: HoldPages(wanted.root, wanted.chunks, reply))
        try:
            pages = held.pages[wanted.first :]
            await to_thread.run_sync(
                send_pages, connection, source.contents(pages), len(pages), limiter=threads
            )
        finally:
            scheduler.tell(LetGo(held.number))
    except (OSError, EOFError, msgspec.DecodeError) as error:
        log.debug("another engine did not take its pages: %s", error)
    except (ActorStopped, ActorCrashed, Overloaded):
        pass  # this engine ends, or has too much to do: the other one computes
