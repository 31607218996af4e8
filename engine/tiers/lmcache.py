"""LMCache's server as the objects of a remote tier: `--kv-remote lmcache://127.0.0.1:PORT`.

The server keeps chunks of one size in shared memory and, if it has adapters for that, on a disk, in Redis
or in S3. It names a chunk by the model and by a hash of the chunk's tokens. Here the model is the identity of
our pages, and 16 numbers from the object's name stand for the tokens. A chunk is the object's length, the
object, and what was there before.

Requests are frames of msgpack over ZeroMQ, contents are copied in the shared memory. So the server is on
this machine, and of the same user. It says nothing when a request fails: the caller limits the time. It
cannot list its chunks or delete one.

Source: `wire.py`, `engine_driven_transfer.py` and `lookup.py` of `lmcache.v1.multiprocess`, version 0.5.6.
"""

import asyncio
import mmap
import secrets
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq
import zmq.asyncio

from personae.engine.object_stores import LMCACHE, StoredObject
from personae.engine.tiers.page_header import NAME_BYTES

# The numbers of operations on the wire; LMCache never changes them.
_LOOKUP, _LOOKUP_STATUS, _END_SESSION = 8, 9, 13
_REGISTER, _CHUNK_SIZE = 14, 21
_PREPARE_STORE, _COMMIT_STORE, _PREPARE_RETRIEVE, _COMMIT_RETRIEVE = 16, 17, 18, 19
_LENGTH = struct.Struct("<I")
_TOKENS = struct.Struct(f"<{NAME_BYTES // 2}H")
_POLL_SECONDS = 0.0005  # while the server fetches a chunk into the shared memory
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - Linux mounts shared memory there

_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode


class _Registration(NamedTuple):
    """What the server said: the model, how many tokens a chunk has, and its shared memory."""

    model: str
    chunk_tokens: int
    memory: mmap.mmap

    def key(self, path: str, request: str) -> dict[str, Any]:
        """The key of an object, for one request."""
        name = bytes.fromhex(path.rpartition("/")[2])
        tokens = [*_TOKENS.unpack(name), *[0] * (self.chunk_tokens - NAME_BYTES // 2)]
        return {
            "model_name": self.model,
            "world_size": 1,
            "worker_id": 0,
            "token_ids": tokens,
            "start": 0,
            "end": len(tokens),
            "request_id": request,
            "num_kv_readers": 1,
        }

    def chunk(self, answer: Any, size: int) -> memoryview | None:
        """The chunk of `size` bytes that the server prepared; None if it prepared none. Raises ValueError for
        one that lies outside of the memory."""
        slots = answer["context"].get("slots") or []
        if not slots:
            return None
        offset, length = slots[0]["offset"], slots[0]["length"]
        if length != size or not 0 <= offset <= len(self.memory) - length:
            raise ValueError("LMCache offers memory that is not there")
        return memoryview(self.memory)[offset : offset + length]


class _Link:
    """A connection, which has one request at a time."""

    def __init__(self, address: str) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)

    async def ask(self, operation: int, *arguments: Any) -> Any:
        """The server's answer."""
        await self._socket.send_multipart([_encode(0), _encode(operation), *map(_encode, arguments)])
        _, _, *answer = await self._socket.recv_multipart()
        return _decode(answer[0]) if answer else None

    def close(self) -> None:
        self._socket.close()


class LMCacheObjects:
    """Implements `Objects` in the LMCache server at `url`, for objects of at most `object_bytes`."""

    lists = False

    def __init__(self, url: str, object_bytes: int) -> None:
        self._address = f"tcp://{url.removeprefix(LMCACHE)}"
        self._chunk_bytes = _LENGTH.size + object_bytes
        self._instance = secrets.randbits(31)
        self._registration: _Registration | None = None
        self._registering = asyncio.Lock()
        self._idle: list[_Link] = []

    async def put(self, path: str, data: bytes) -> None:
        """See Objects. An object that is there stays as it is."""
        async with self._linked(path) as (link, server):
            key = server.key(path, request := secrets.token_hex(8))
            chunk = server.chunk(await link.ask(_PREPARE_STORE, key, self._instance), self._chunk_bytes)
            if chunk is not None:
                chunk[: _LENGTH.size + len(data)] = _LENGTH.pack(len(data)) + data
                await link.ask(_COMMIT_STORE, key, self._instance, b"")
            await link.ask(_END_SESSION, request)

    async def get(self, path: str, size: int) -> memoryview | None:
        """See Objects."""
        data = None
        async with self._linked(path) as (link, server):
            key = server.key(path, request := secrets.token_hex(8))
            await link.ask(_LOOKUP, key | {"worker_id": None}, 1)
            while (found := await link.ask(_LOOKUP_STATUS, request)) is None:  # noqa: ASYNC110 - it is a server
                await asyncio.sleep(_POLL_SECONDS)
            if found:
                answer = await link.ask(_PREPARE_RETRIEVE, key, self._instance)
                if (chunk := server.chunk(answer, self._chunk_bytes)) is not None:
                    data = bytes(chunk)
                    await link.ask(_COMMIT_RETRIEVE, key, self._instance)
            await link.ask(_END_SESSION, request)
        if data is None:
            raise FileNotFoundError(path)
        if _LENGTH.unpack_from(data)[0] != size:
            return None
        return memoryview(data)[_LENGTH.size :][:size]

    async def list(self, prefix: str) -> AsyncGenerator[Sequence[StoredObject], None]:
        """Nothing: the server cannot say what it has. Finds out whether it answers, and tells a server that
        was started anew who we are."""
        self._registration = None
        async with self._linked(prefix):
            pass
        nothing: tuple[Sequence[StoredObject], ...] = ()
        for some in nothing:
            yield some

    async def delete(self, paths: Sequence[str]) -> None:
        """Does nothing: the server evicts what is used least."""

    def close(self) -> None:
        """Close all connections."""
        while self._idle:
            self._idle.pop().close()

    @asynccontextmanager
    async def _linked(self, path: str) -> AsyncIterator[tuple[_Link, _Registration]]:
        """A connection, and what the server said of itself. After a failure the next one asks again."""
        link = self._idle.pop() if self._idle else _Link(self._address)
        try:
            async with self._registering:
                if self._registration is None:
                    self._registration = await self._register(link, path.partition("/")[0])
                server = self._registration
            yield link, server
        except BaseException:  # an answer to its last request may still come
            link.close()
            self._registration = None
            raise
        self._idle.append(link)

    async def _register(self, link: _Link, identity: str) -> _Registration:
        """Tell the server how long chunks are. Raises ValueError if it cannot keep them."""
        model = f"personae-{identity}"
        tokens = await link.ask(_CHUNK_SIZE)
        if tokens < NAME_BYTES // 2:
            raise ValueError(f"LMCache needs a --chunk-size of at least {NAME_BYTES // 2}")
        layout = {
            "instance_id": self._instance,
            "model_name": model,
            "world_size": 1,
            "block_size": tokens,
            "num_layers": 1,
            "hidden_dim_size": self._chunk_bytes,
            "dtype_str": "uint8",
            "use_mla": True,  # one tensor, not one for keys and one for values
            "num_physical_slots": 1,
        }
        name = (await link.ask(_REGISTER, layout))["shm_name"].removeprefix("/")
        if not name or "/" in name:
            raise ValueError(
                "LMCache has no shared memory; start it with --supported-transfer-mode engine_driven, "
                "--shm-name NAME and --no-l1-use-lazy"
            )
        with (_SHARED_MEMORY / name).open("r+b") as file:
            return _Registration(model, tokens, mmap.mmap(file.fileno(), 0))
