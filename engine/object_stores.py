"""Object stores by their URL, with obstore. Its drivers take credentials from their usual places."""

import re
from collections.abc import AsyncGenerator, Sequence
from datetime import datetime, timedelta
from os import environ
from pathlib import Path
from typing import Any, NamedTuple

SCHEMES = ("s3://", "gs://", "az://", "file:///")
MEMORY = "memory://"
LMCACHE, MOONCAKE = "lmcache://", "mooncake://"  # stores of pages; see `tiers/`
_SECONDS = timedelta(seconds=20)  # for one request
_CONNECT = timedelta(seconds=5)
_RETRY_SECONDS = timedelta(seconds=30)
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
_QUERY = re.compile(r"\?[^\s'\")]*")  # of a URL: a signature may be in it
_in_memory: dict[str, Any] = {}  # stores of this process, by URL


def check_store_url(url: str, schemes: Sequence[str] = SCHEMES) -> str:
    """The URL of an object store, without a slash at its end. Raises ValueError."""
    place = url.partition("://")[2]
    if not url.startswith(tuple(schemes)) or not place.strip("/"):
        raise ValueError(f"'{url}' is no object store; write it as s3://bucket/prefix or file:///folder.")
    if "?" in place or "@" in place.partition("/")[0]:
        raise ValueError("the URL of an object store has no credentials; its driver reads the environment.")
    return url.rstrip("/")


def open_store(url: str, retries: int) -> Any:
    """obstore's store at `url`, whose requests end in time. `memory://NAME` is one store in each process.
    Raises what obstore raises, and ImportError without it."""
    from obstore import store

    if url.startswith("file://"):
        return store.LocalStore(url.removeprefix("file://"), mkdir=True)
    if url.startswith(MEMORY):
        return _in_memory.setdefault(url, store.MemoryStore())
    client: Any = {"timeout": _SECONDS, "connect_timeout": _CONNECT, "allow_http": _is_plain()}
    retry: Any = {"max_retries": retries, "retry_timeout": _RETRY_SECONDS}
    return store.from_url(url, client_options=client, retry_config=retry)


def _is_plain() -> bool:
    """Whether the environment names an endpoint without TLS, such as a MinIO of one's own."""
    return any(environ.get(name, "").startswith("http://") for name in _ENDPOINTS)


def reason(error: BaseException) -> str:
    """What the driver says, on one line without its debugging text and without signatures."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return _QUERY.sub("", lines[0]).strip().rstrip(".")


class StoredObject(NamedTuple):
    """An object in a listing. `size`: None if the store does not say."""

    path: str
    size: int | None
    modified: datetime


class AsyncObjects:
    """The objects of a store, for asyncio: obstore's futures are asyncio's. Raises what obstore raises."""

    lists = True

    def __init__(self, url: str) -> None:
        import obstore

        if url.startswith("file://"):
            Path(url.removeprefix("file://")).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._api: Any = obstore
        self._store = open_store(url, retries=0)

    async def put(self, path: str, data: bytes) -> None:
        """Write an object whole, or not at all."""
        await self._api.put_async(self._store, path, data, use_multipart=False)

    async def get(self, path: str, size: int) -> memoryview | None:
        """The content of an object; None if it has another size, and nothing is read then. Raises
        FileNotFoundError if it is not there."""
        found = await self._api.get_async(self._store, path)
        return memoryview(await found.bytes_async()) if found.meta["size"] == size else None

    async def list(self, prefix: str) -> AsyncGenerator[Sequence[StoredObject], None]:
        """The objects below `prefix`, some at a time."""
        async for some in self._api.list(self._store, prefix):
            yield [StoredObject(each["path"], each["size"], each["last_modified"]) for each in some]

    async def delete(self, paths: Sequence[str]) -> None:
        """Delete objects. May raise FileNotFoundError if one is not there."""
        await self._api.delete_async(self._store, paths)

    def close(self) -> None:
        """Does nothing: obstore frees what it holds."""
