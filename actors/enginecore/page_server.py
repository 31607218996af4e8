"""Gives pages of this engine's prefix cache to other engines of the same server, by key.

On one machine each listens on a Unix socket in a folder that only this user may enter. On another machine it
listens on TCP, at the address by which it reached the frontend: there only who shows the certificate of the
server's engines gets an answer. The scheduler keeps the pages from eviction while they are sent. They are
read and sent on worker threads while steps run: nobody writes to a page that is in the prefix cache.
"""

import logging
import os
import socket
import ssl
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec
from anyio import CancelScope, CapacityLimiter, to_thread

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
HANDSHAKE_SECONDS = 5.0
MOST_UNKNOWN = 64  # connections without a certificate yet; beyond that the oldest is closed
PAUSE_SECONDS = 1.0  # if no connection can be accepted

log = logging.getLogger("personae.kv")


class PageListener(NamedTuple):
    """Where an engine gives pages to others. `tls` is for TCP."""

    socket: socket.socket
    address: str
    tls: ssl.SSLContext | None = None


def listen_at_path(path: Path) -> PageListener | None:
    """Listen on a Unix socket. None, with a warning, if that is impossible."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)  # of an engine core that has ended
        listener.bind(str(path))
        os.chmod(path, 0o600)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        _cannot_listen(error)
        return None
    return PageListener(listener, str(path))


def listen_at_host(host: str, tls: ssl.SSLContext) -> PageListener | None:
    """Listen on a free TCP port of this address of the machine. None, with a warning, if that is
    impossible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
    except OSError as error:
        _cannot_listen(error)
        return None
    return PageListener(listener, f"{host}:{listener.getsockname()[1]}", tls)


def _cannot_listen(error: OSError) -> None:
    log.warning("this engine cannot give pages to others, they compute them: %s", error)


async def serve_pages(listener: PageListener, source: PageSource, scheduler: Ref[Message]) -> None:
    """Serve until cancelled. Whatever a fetcher does ends only its own connection."""
    limiter, threads = CapacityLimiter(MOST_AT_ONCE), CapacityLimiter(MOST_AT_ONCE)
    unknown: OrderedDict[int, CancelScope] = OrderedDict()

    async def answer(connection: socket.socket) -> None:
        if listener.tls is not None:
            identified = await _identified(connection, listener.tls, unknown)
            if identified is None:
                return
            connection = identified
        with connection:
            connection.setblocking(True)
            async with limiter:
                await _answer(connection, source, scheduler, threads)

    with listener.socket as listening:
        listening.setblocking(False)
        async with anyio.create_task_group() as tasks:
            while True:
                await anyio.wait_readable(listening)
                try:
                    connection, _ = listening.accept()
                except (BlockingIOError, ConnectionAbortedError):
                    continue
                except OSError as error:  # too many open files: others close some
                    log.warning("this engine cannot give pages now, others compute them: %s", error)
                    await anyio.sleep(PAUSE_SECONDS)
                    continue
                connection.setblocking(False)
                tasks.start_soon(answer, connection)


async def _identified(
    connection: socket.socket, tls: ssl.SSLContext, unknown: OrderedDict[int, CancelScope]
) -> ssl.SSLSocket | None:
    """The connection after its handshake. None, and closed, if the other side shows no certificate of ours in
    time, or too many others came after it."""
    reason = f"it showed no certificate within {HANDSHAKE_SECONDS:g} s"
    with connection, anyio.move_on_after(HANDSHAKE_SECONDS) as scope:
        unknown[id(scope)] = scope
        while len(unknown) > MOST_UNKNOWN:
            unknown.popitem(last=False)[1].cancel()
        try:
            return await _handshake(connection, tls)
        except OSError as error:
            reason = str(error) or type(error).__name__
        finally:
            unknown.pop(id(scope), None)
    log.debug("closed a connection to the port for pages: %s", reason)
    return None


async def _handshake(connection: socket.socket, tls: ssl.SSLContext) -> ssl.SSLSocket:
    """Do the handshake on a socket that does not block. Raises OSError."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else TLS is 100 times slower
    session = tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
    try:
        while True:
            try:
                session.do_handshake()
                return session
            except ssl.SSLWantReadError:
                await anyio.wait_readable(session)
            except ssl.SSLWantWriteError:
                await anyio.wait_writable(session)
    except BaseException:
        session.close()
        raise


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
            agent = source.agent if wanted.nixl else None
            await to_thread.run_sync(
                send_pages, connection, source.contents(pages), len(pages), agent, limiter=threads
            )
        finally:
            scheduler.tell(LetGo(held.number))
    except (OSError, EOFError, msgspec.DecodeError) as error:
        log.debug("another engine did not take its pages: %s", error)
    except (ActorStopped, ActorCrashed, Overloaded):
        pass  # this engine ends, or has too much to do: the other one computes
