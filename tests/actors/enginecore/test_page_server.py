"""An engine gives pages to others: over a Unix socket, and over TCP to who shows the server's certificate."""

import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest
from anyio import to_thread
from patience import PATIENCE
from virtual_clock import real_clock

from personae.actors.enginecore import page_server
from personae.actors.enginecore.page_server import (
    MOST_AT_ONCE,
    PageListener,
    listen_at_host,
    listen_at_path,
    serve_pages,
)
from personae.actors.messages import LetGo, Message
from personae.engine.machine_sockets import TlsIdentity, client_context, new_identity, server_context, trust
from personae.engine.scheduling.page_names import page_keys, root_key
from personae.engine.scheduling.running import HeldPages
from personae.engine.tiers import transfer
from personae.engine.tiers.nixl import PACKAGES, WINDOWS, NixlAgent
from personae.engine.tiers.peers import PeerTier
from personae.engine.tiers.tier import PageBytes, PageFetch
from personae.engine.tiers.transfer import CERTIFIED, PageSource

pytestmark = real_clock
PAGE = 100
KEYS = page_keys(root_key(b"ann", None), range(20), 2)


class Holder:
    """A scheduler that has as many pages as are wanted, numbered from 0, up to `most`."""

    def __init__(self, most: int = 100) -> None:
        self.most, self.held, self.let_go = most, 0, 0

    async def ask(self, make: Callable[[Any], Any]) -> HeldPages:
        self.held += 1
        return HeldPages(self.held, tuple(range(min(len(make(None).chunks), self.most))))

    def tell(self, message: Message) -> None:
        assert isinstance(message, LetGo)
        self.let_go += 1


class Server(NamedTuple):
    """What an engine has to give, where, and what a fetcher needs besides."""

    holder: Holder
    source: PageSource
    address: str
    tls: ssl.SSLContext | None


def contents(pages: Any) -> PageBytes:
    return np.repeat(np.array(pages, np.uint8)[:, None], PAGE, axis=1)


def contexts(identity: TlsIdentity) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    server = server_context(identity)
    trust(server, identity.certificate)
    return server, client_context(identity, identity.certificate)


@asynccontextmanager
async def serving(
    folder: Path | None, holder: Holder, read: Callable[[Any], PageBytes] = contents
) -> AsyncIterator[Server]:
    """An engine that serves pages at a Unix socket in `folder`, or over TCP."""
    source = PageSource("a model", PAGE)
    source.read = read
    client: ssl.SSLContext | None = None
    listener: PageListener | None
    if folder is not None:
        listener = listen_at_path(folder / "0")
    else:
        server, client = contexts(new_identity(CERTIFIED))
        listener = listen_at_host("127.0.0.1", server)
    assert listener is not None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve_pages, listener, source, holder)  # type: ignore[arg-type]  # what it uses of one
        yield Server(holder, source, listener.address, client)
        tasks.cancel_scope.cancel()


async def fetched(server: Server, first: int, count: int, **more: Any) -> tuple[list[int], str]:
    """The numbers of the pages that came, and what went wrong."""
    call = partial(
        transfer.fetch_pages,
        server.address,
        server.source.identity,
        KEYS[:count],
        first,
        PAGE,
        PATIENCE,
        **{"tls": server.tls, **more},
    )
    pages, problem = await to_thread.run_sync(call)
    assert (pages == pages[:, :1]).all()
    return pages[:, 0].tolist(), problem


def nixl_agents(server: Server) -> NixlAgent:
    """The agent of a fetcher, after the server got one."""
    if not any(map(find_spec, PACKAGES)):
        pytest.skip("NIXL is not installed: pip install --no-deps nixl-cu13")
    server.source.agent = NixlAgent()
    return NixlAgent()


async def test_a_window_into_which_a_late_transfer_may_write_is_used_by_nobody(tmp_path: Path) -> None:
    async with serving(tmp_path, Holder()) as server:
        agent = nixl_agents(server)
        assert server.source.agent is not None
        taken = [agent.take_window() for _ in range(WINDOWS)]
        assert agent.take_window() is None
        assert await fetched(server, 0, 3, agent=agent) == ([], "all windows of NIXL are in use")
        window = taken.pop()
        assert window is not None
        states = ["PROC"] * 3 + ["DONE"]
        agent._agent.check_xfer_state, check = lambda handle: states.pop(0), agent._agent.check_xfer_state
        holder = server.source.agent
        there = holder.take_window()
        assert there is not None
        there.memory[:9] = 7
        with pytest.raises(TimeoutError):
            agent.read(holder.metadata, there.address, 9, window, 0.0)
        agent.give_back(window)
        assert agent.take_window() is None, "the transfer may still write"
        assert agent.take_window() is None
        assert agent.take_window() is not None, "it has ended"
        agent._agent.check_xfer_state = check
        with pytest.raises(OSError, match="NIXL"):
            agent.read(holder.metadata, 4096, 9, window, PATIENCE)


@pytest.mark.parametrize("kind", ["unix", "tcp", "nixl"])
async def test_pages_come_whole_and_in_order_and_are_let_go(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", 3 * PAGE)
    async with serving(None if kind == "tcp" else tmp_path, Holder(9)) as server:
        more = {"agent": nixl_agents(server)} if kind == "nixl" else {}
        assert await fetched(server, 2, 8, **more) == ([2, 3, 4, 5, 6, 7], "")
        assert await fetched(server, 7, 10, **more) == ([7, 8], ""), "it has evicted one: no error"
        assert await fetched(server, 0, 1, **more) == ([0], "")
        with anyio.fail_after(PATIENCE):
            while server.holder.let_go < 3:  # noqa: ASYNC110 - after the last byte
                await anyio.sleep(0.005)


async def test_pages_that_came_before_a_transfer_broke_are_used_and_the_engine_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", PAGE)
    broken = True

    def read(pages: Any) -> PageBytes:
        if broken and pages[0] == 3:
            raise OSError("it ends")
        return contents(pages)

    async with serving(tmp_path, Holder(), read) as server:
        tier = PeerTier(server.source)

        async def fetch(ticket: int) -> int:
            wanted = PageFetch(ticket, tuple(KEYS[:1]), tuple(KEYS[1:6]), PATIENCE, server.address)
            return await to_thread.run_sync(tier.fetch, wanted)

        ticket = tier.reserve(5)
        assert await fetch(ticket) == 2
        assert tier.take(ticket)[:, 0].tolist() == [1, 2]
        assert tier.counts().errors == 1
        assert tier.has(KEYS[6].name, server.address)
        broken = False
        assert await fetch(tier.reserve(5)) == 5
        server.source.identity = b"another"
        assert await fetch(tier.reserve(5)) == 0
        assert not tier.has(KEYS[6].name, server.address), "an engine that gives nothing is left alone"


async def test_who_shows_no_certificate_gets_nothing_and_keeps_nobody_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_server, "MOST_UNKNOWN", 4)
    monkeypatch.setattr(page_server, "HANDSHAKE_SECONDS", 10 * PATIENCE)
    async with serving(None, Holder()) as server:
        host, _, port = server.address.rpartition(":")
        with ExitStack() as idle:

            def connect() -> socket.socket:
                return idle.enter_context(socket.create_connection((host, int(port)), PATIENCE))

            silent = [await to_thread.run_sync(connect) for _ in range(8)]
            for connection in silent[:4]:
                assert await to_thread.run_sync(connection.recv, 1) == b"", "the oldest are closed"
            plain = await to_thread.run_sync(connect)
            plain.sendall(transfer._frame(transfer.PagesWanted(server.source.identity, b"", (b"i",), 0)))
            with suppress(ConnectionError):
                while await to_thread.run_sync(plain.recv, 100):  # an alert of TLS, then it is closed
                    pass
            own = client_context(new_identity(CERTIFIED), new_identity(CERTIFIED).certificate)
            pages, problem = await fetched(server, 0, 5, tls=own)
            assert not pages
            assert "certificate" in problem.lower()
            pages, problem = await fetched(server, 0, 5, tls=None)
            assert not pages
            assert "no certificate" in problem
            assert not server.holder.held
            assert await fetched(server, 0, 5) == ([0, 1, 2, 3, 4], "")


async def test_a_fetcher_that_believes_everybody_and_shows_nothing_is_not_served() -> None:
    async with serving(None, Holder()) as server:
        stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
        pages, problem = await fetched(server, 0, 5, tls=stranger)
        assert not pages
        assert problem
        assert not server.holder.held


async def test_a_connection_that_shows_nothing_is_closed_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_server, "HANDSHAKE_SECONDS", 0.05)
    async with serving(None, Holder()) as server:
        host, _, port = server.address.rpartition(":")
        with await to_thread.run_sync(socket.create_connection, (host, int(port)), PATIENCE) as silent:
            assert await to_thread.run_sync(silent.recv, 1) == b""


async def test_fetchers_that_ask_byte_by_byte_or_do_not_read_keep_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "SEND_SECONDS", 0.1)
    done = threading.Event()

    def trickle(connection: socket.socket) -> None:
        try:
            connection.sendall((1000).to_bytes(4, "little"))
            while not done.wait(0.01):
                connection.sendall(b"x")
        except OSError:
            return  # it was closed

    async with serving(tmp_path, Holder()) as server:
        with ExitStack() as open_ones:
            async with anyio.create_task_group() as tasks:
                for _ in range(2 * MOST_AT_ONCE):
                    connection = open_ones.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                    await to_thread.run_sync(connection.connect, server.address)
                    tasks.start_soon(to_thread.run_sync, trickle, connection)
                with anyio.fail_after(PATIENCE):  # a slow machine may need a second try
                    while (await fetched(server, 0, 5))[0] != [0, 1, 2, 3, 4]:
                        pass
                done.set()
