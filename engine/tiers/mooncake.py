"""A Mooncake store as the objects of a remote tier: `--kv-remote mooncake://HOST:PORT`, that of its master.

Objects lie in the memory, or on the disks, of the store's own services (`mooncake_client`). This process
gives it no memory, so that objects outlive it. The master lists them over HTTP (`?metrics_port=`, 9003).

Mooncake's calls block, some for a minute when a service stands still, and cannot be cancelled. Each runs on a
thread of its own. When its time is over it is left behind, with memory that is its own. `setup` keeps
Python's lock while it waits. So it is called only after the master has answered over HTTP, and tries once.

Source: https://kvcache-ai.github.io/Mooncake/python-api-reference/mooncake-store.html, version 0.3.13.
"""

import asyncio
import os
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import httpx

from personae.engine.object_stores import StoredObject

Answer = TypeVar("Answer")

METRICS_PORT = 9003  # of a master, unless it has another one
BUFFER_BYTES = 128 * 2**20  # for objects that are under way
_NOT_FOUND = -704
_NO_ROOM = -200
_UNDATED = datetime.fromtimestamp(0, UTC)
_SOME = 1000  # paths of a listing


class MooncakeObjects:
    """Implements `Objects` in the store whose master is at `url`. The environment names the network as for
    Mooncake itself: MOONCAKE_PROTOCOL (tcp) and MOONCAKE_DEVICE. Raises ImportError without Mooncake."""

    lists = True

    def __init__(self, url: str) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
        from mooncake.store import MooncakeDistributedStore

        self._new_store: Callable[[], Any] = MooncakeDistributedStore
        parts = urlsplit(url)
        assert parts.hostname is not None, "the URL was checked"
        self._host, self._master = parts.hostname, parts.netloc
        port = int(parse_qs(parts.query).get("metrics_port", [METRICS_PORT])[0])
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._names = f"http://{host}:{port}/get_all_keys"
        self._store: Any = None
        self._setting_up: asyncio.Task[None] | None = None

    async def put(self, path: str, data: bytes) -> None:
        """See Objects."""
        code = await self._ask("put", path, data)
        if code:
            raise OSError("the store has no room" if code == _NO_ROOM else f"it answered {code} to put")

    async def get(self, path: str, size: int) -> memoryview | None:
        """See Objects. `get` returns no bytes for an object that is not there, and for any failure."""
        data: bytes = await self._ask("get", path)
        if not data:
            if await self._ask("is_exist", path):
                raise OSError("it could not get an object")
            raise FileNotFoundError(path)
        return memoryview(data) if len(data) == size else None

    async def list(self, prefix: str) -> AsyncGenerator[Sequence[StoredObject], None]:
        """See Objects. Neither size nor time are known."""
        async with httpx.AsyncClient(trust_env=False) as client, client.stream("GET", self._names) as answer:
            answer.raise_for_status()
            some: list[StoredObject] = []
            async for path in answer.aiter_lines():
                if path.startswith(f"{prefix}/"):
                    some.append(StoredObject(path, None, _UNDATED))
                if len(some) == _SOME:
                    yield some
                    some = []
            yield some

    async def delete(self, paths: Sequence[str]) -> None:
        """See Objects."""
        for path in paths:
            if (code := await self._ask("remove", path, True)) not in (0, _NOT_FOUND):
                raise OSError(f"it answered {code} to remove")

    def close(self) -> None:
        """Does nothing: closing may block. The store forgets who is silent."""

    async def _ask(self, name: str, *arguments: Any) -> Any:
        """The answer of one of the store's functions."""
        if self._store is None:
            if self._setting_up is None or self._setting_up.done():
                self._setting_up = asyncio.create_task(self._set_up())
            await asyncio.wait([self._setting_up])
            self._setting_up.result()
        return await _on_a_thread(partial(getattr(self._store, name), *arguments))

    async def _set_up(self) -> None:
        """Connect to the store. Raises OSError."""
        async with httpx.AsyncClient(trust_env=False) as client:
            (await client.get(self._names.replace("get_all_keys", "health"))).raise_for_status()
        store = self._new_store()
        code = await _on_a_thread(
            lambda: store.setup(
                _own_address(self._host),
                "P2PHANDSHAKE",
                0,
                BUFFER_BYTES,
                os.environ.get("MOONCAKE_PROTOCOL", "tcp"),
                os.environ.get("MOONCAKE_DEVICE", ""),
                self._master,
            )
        )
        if code:
            raise OSError(f"it answered {code} to setup")
        self._store = store


def _own_address(host: str) -> str:
    """The address of this machine on the way to a host."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, 9))  # sends nothing
        return str(way.getsockname()[0])


async def _on_a_thread(call: Callable[[], Answer]) -> Answer:
    """Run a call on a thread that nobody has to wait for. Raises what it raises."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Answer] = loop.create_future()

    def settle(result: Answer | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type]  # without an error it is an answer

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except Exception as raised:  # whatever the library raises
            error = raised
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="kv-mooncake", daemon=True).start()
    return await answer
