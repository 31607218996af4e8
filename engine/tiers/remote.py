"""The tier in a store of objects, which several servers may share: an object for each page.

    URL/IDENTITY/TENANT/SESSION/NAME    a header and a page, as `page_header.py` has them

The last four are digests in hexadecimal: of everything besides the tokens that decides a page's content, of
its owner (`PageOwner`; zeros without a session), and the page's name. So a listing says what is there and
whose it is. The first listing is made at the start, further ones find what other servers stored or deleted.
A page is written whole or not at all, and a page that is not what its path says is never used. A page that
is no longer needed is deleted: the least recently used one here of the tenant that has the most for its
weight.

A store that cannot list what it has (`Objects.lists`) is asked for every page: first for one, and for others
when that one is there. Its objects have no tenant and no session in their paths (zeros).

One thread waits for the store, and every request to it has a limit of time. After a failure the store is
asked for nothing for a while, longer after each further one. Whatever fails is logged in one sentence and
counted. Requests are computed as without a tier.
"""

import asyncio
import contextlib
import hashlib
import logging
import threading
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from datetime import datetime
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from personae.engine.object_stores import StoredObject, reason
from personae.engine.plan import PageKey, PageOwner
from personae.engine.tiers.page_header import (
    DIGEST_BYTES,
    NAME_BYTES,
    NO_SESSION,
    header_bytes,
    pack_header,
    unpack_header,
)
from personae.engine.tiers.page_index import PageIndex
from personae.engine.tiers.staging import StagedTier
from personae.engine.tiers.tier import PageBytes, PageFetch, TierCounts

QUEUE_BYTES = 64 * 2**20  # that wait to be stored
IN_FLIGHT_BYTES = 64 * 2**20  # of a fetch at once, and of all stores
MOST_REQUESTS = 32  # of a fetch at once, and of all stores
REQUEST_SECONDS = 5.0
LIST_SECONDS = 60.0  # between two listings, or
LIST_SHARE = 20.0  # so many times as long as a listing takes
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds without a request after a failure
CLOSE_SECONDS = 5.0
_MOST_VICTIMS = 64  # pages that are deleted for one that is stored
_MOST_DELETED = 1000  # objects in one request
_MOST_FORGOTTEN = 2**16  # sessions that wait to be deleted
_SLICE = 256  # entries of a listing that are taken at once, while others wait for the lock

Answer = TypeVar("Answer")

_log = logging.getLogger("personae.kv")


class Objects(Protocol):
    """What the tier asks of a store: see `AsyncObjects`. `lists`: whether `list` says what it has."""

    @property
    def lists(self) -> bool:
        """See the class."""

    async def put(self, path: str, data: bytes, /) -> None:
        """Write an object whole, or not at all."""

    async def get(self, path: str, size: int, /) -> memoryview | None:
        """The content of an object, if it has that size."""

    def list(self, prefix: str, /) -> AsyncGenerator[Sequence[StoredObject], None]:
        """The objects below a prefix, some at a time."""

    async def delete(self, paths: Sequence[str], /) -> None:
        """Delete objects."""

    def close(self) -> None:
        """Called at the end, on the thread of the other calls."""


class _PagePath(NamedTuple):
    """The path of a page. `session` is `NO_SESSION` if it has none."""

    tenant: bytes
    session: bytes
    name: bytes


class _Storing(NamedTuple):
    """Pages that wait to be stored."""

    keys: Sequence[PageKey]
    owners: Sequence[PageOwner]
    ready: Callable[[], PageBytes]


class RemoteTier(StagedTier):
    """Implements `Tier` over `objects`, with at most about `bound` bytes there, in pages of `page_bytes`.

    `identity` says what else decides a page's content. Servers that share a store each see to the bound, by
    what they know of it.
    """

    def __init__(self, objects: Objects, bound: int, page_bytes: int, identity: str) -> None:
        super().__init__(page_bytes)
        self._objects = objects
        self._capacity = bound // page_bytes
        self._identity = hashlib.sha256(f"{identity} {page_bytes}".encode()).digest()[:DIGEST_BYTES]
        self._index = PageIndex[_PagePath]()
        self._changed: set[bytes] = set()  # names that came or went since the listing began
        self._coming: set[bytes] = set()  # names in the index that are being stored
        self._queued = 0  # pages
        self._stored = self._errors = 0
        self._pauses = 0  # in a row
        self._silent_until = 0.0  # no request before
        self._reported: set[str] = set()
        self._to_forget: dict[tuple[bytes, bytes], None] = {}  # tenants and sessions
        self._width = min(max(IN_FLIGHT_BYTES // page_bytes, 1), MOST_REQUESTS)
        self._puts = asyncio.Semaphore(self._width)
        self._queue: asyncio.Queue[_Storing | bool] = asyncio.Queue()  # True: delete sessions; False: end
        self._closed = False
        self.listed = threading.Event()  # the first listing is complete, or has failed
        self._loop = asyncio.new_event_loop()
        self._work = self._loop.create_task(self._run())
        self._thread = threading.Thread(target=self._serve, name="kv-remote", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        """The thread."""
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._work)
        if fetches := asyncio.all_tasks(self._loop):
            for each in fetches:
                each.cancel()
            self._loop.run_until_complete(asyncio.wait(fetches))
        self._objects.close()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _tell(self, item: _Storing | bool) -> None:
        """Give the thread something to do. With the lock."""
        if not self._closed:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    # What the scheduler asks

    @property
    def pages(self) -> int:
        """See TierIndex."""
        return len(self._index)

    @property
    def room(self) -> int:
        """See TierIndex."""
        if self._closed or self._silent or not self._capacity:
            return 0
        return max(QUEUE_BYTES // self.page_bytes, 1) - self._queued

    @property
    def stores(self) -> bool:
        """See TierIndex."""
        return True

    @property
    def _silent(self) -> bool:
        return time.monotonic() < self._silent_until

    def has(self, name: bytes, source: str | None = None) -> bool:
        """See TierIndex."""
        known = name in self._index and name not in self._coming
        return (known or not self._objects.lists) and not self._silent

    def wants(self, name: bytes) -> bool:
        """See TierIndex."""
        return name not in self._index

    @property
    def pending(self) -> int:
        """See Tier."""
        return self._queued

    def counts(self) -> TierCounts:
        """See TierIndex."""
        with self._lock:
            counts = TierCounts(self._stored, self._errors)
            self._stored = self._errors = 0
            return counts

    # Fetching

    def fetch(self, fetch: PageFetch) -> int:
        """See Tier."""
        pages = np.empty((len(fetch.keys), self.page_bytes), np.uint8)
        with self._lock:
            if self._closed or fetch.ticket not in self._tickets:
                return 0
            future = asyncio.run_coroutine_threadsafe(self._get_pages(fetch, pages), self._loop)
        with self._fetch_into(fetch.ticket, len(fetch.keys)) as got, contextlib.suppress(CancelledError):
            if count := future.result():
                got.append(pages[:count])
        with self._lock:
            for key in reversed(fetch.keys[: len(got[0]) if got else 0]):
                self._index.use(key.name)  # a page is not needed longer than those before it
        return len(got[0]) if got else 0

    async def _get_pages(self, fetch: PageFetch, pages: PageBytes) -> int:
        """Fetch pages into `pages`, some at once. Returns how many of the first ones are there."""
        keys, numbers = fetch.keys, iter(range(len(fetch.keys)))
        missing = len(keys)  # the first of those that did not come
        if not self._objects.lists and not await self._get(keys[next(numbers)], pages[0]):
            return 0

        async def fetch_some() -> None:
            nonlocal missing
            for number in numbers:
                wanted = number < missing and self._wants(fetch.ticket)  # else others compute them by now
                if not wanted or not await self._get(keys[number], pages[number]):
                    missing = min(missing, number)
                    return

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(self._width, len(keys))):
                tasks.create_task(fetch_some())
        return missing

    async def _get(self, key: PageKey, page: PageBytes) -> bool:
        """Fetch a page, and check that it is the right one and whole."""
        place = self._index.get(key.name)
        if place is None and not self._objects.lists:
            place = _PagePath(NO_SESSION, NO_SESSION, key.name)
        if place is None or not self.has(key.name):
            return False
        begin = header_bytes(len(key.tokens))
        try:
            data = await self._request(self._objects.get(self._path(place), begin + self.page_bytes))
        except FileNotFoundError:  # another server has deleted it
            self._remove(key.name)
            return False
        except Exception as error:
            self._fail("a page cannot be fetched from --kv-remote, it is computed", error)
            return False
        header = None if data is None else unpack_header(self._identity, data)
        if data is not None and header is not None and header.key == key:
            page[:] = np.frombuffer(data, np.uint8)[begin:]
            if header.checksum == zlib.crc32(page.data):
                return True
        self._report("a page in --kv-remote is damaged or foreign, it is computed")
        self._remove(key.name)
        await self._delete([place])
        return False

    def _remove(self, name: bytes) -> None:
        with self._lock:
            self._index.remove(name)
            self._changed.add(name)

    # Storing

    def store(
        self, keys: Sequence[PageKey], owners: Sequence[PageOwner], ready: Callable[[], PageBytes]
    ) -> None:
        """See Tier."""
        with self._lock:
            if self._capacity and not self._closed:
                self._queued += len(keys)
                self._tell(_Storing(keys, owners, ready))

    def forget(self, tenant: bytes, session: bytes) -> None:
        """See Tier."""
        with self._lock:
            self._forget(tenant, session)
            if len(self._to_forget) < _MOST_FORGOTTEN:
                self._to_forget[tenant, session] = None
                self._tell(True)
                return
        self._report("too many deleted sessions wait for --kv-remote; pages of some stay there")

    def _forget(self, tenant: bytes, session: bytes) -> None:
        """Use the pages of a session no more. With the lock."""
        self._changed.update(place.name for place in self._index.remove_session(tenant, session))

    async def _run(self) -> None:
        """Do what is to be done, in order; several stores at once."""
        async with asyncio.TaskGroup() as tasks:
            listing = tasks.create_task(self._keep_listing())
            storing: set[asyncio.Task[None]] = set()
            while item := await self._queue.get():
                if isinstance(item, _Storing):
                    storing.add(task := tasks.create_task(self._store(item)))
                    task.add_done_callback(storing.discard)
                else:
                    if storing:
                        await asyncio.wait(storing)  # they may have pages of the session
                    await self._delete_sessions()
            listing.cancel()
        if self._to_forget:
            self._report(f"pages of {len(self._to_forget)} deleted sessions stay in --kv-remote")

    async def _store(self, item: _Storing) -> None:
        keys, owners, ready = item
        try:
            if not self._silent:
                content = await self._loop.run_in_executor(None, ready)
                async with asyncio.TaskGroup() as tasks:
                    for key, owner, page in zip(keys, owners, content, strict=True):
                        tasks.create_task(self._put(key, owner, page))
        finally:
            with self._lock:
                self._queued -= len(keys)

    async def _put(self, key: PageKey, owner: PageOwner, page: PageBytes) -> None:
        """Store a page, if it is not there yet and the store answers."""
        async with self._puts:
            if key.name in self._index or self._silent:
                return
            whose = (owner.tenant, owner.session or NO_SESSION)
            place = _PagePath(*whose if self._objects.lists else (NO_SESSION, NO_SESSION), key.name)
            with self._lock:
                victims = self._make_room(owner)
                self._coming.add(key.name)
                self._index.add(key.name, place, owner)  # it counts from now on
            stored = False
            try:
                await self._delete(victims)
                if not self._silent:
                    data = pack_header(self._identity, 0, key, owner, page) + page.tobytes()
                    await self._request(self._objects.put(self._path(place), data))
                    stored = True
            except Exception as error:
                self._fail("pages cannot be stored in --kv-remote", error)
            finally:
                with self._lock:
                    self._coming.remove(key.name)
                    self._changed.add(key.name)
                    kept = self._index.get(key.name) == place
                    if kept and not stored:
                        self._index.remove(key.name)
                    self._stored += stored
            if stored and not kept:  # it has made room, or its session was deleted
                await self._delete([place])

    def _make_room(self, owner: PageOwner) -> list[_PagePath]:
        """The pages to delete for one more of this owner. With the lock."""
        victims: list[_PagePath] = []
        for _ in range(_MOST_VICTIMS):
            if len(self._index) < self._capacity or (victim := self._index.pop(owner)) is None:
                break
            self._changed.add(victim.name)
            if victim.name not in self._coming:
                victims.append(victim)
        return victims

    # Deleting

    async def _delete(self, places: Sequence[_PagePath]) -> None:
        """Delete pages. Those that stay are found again by the next listing."""
        for place in places:
            try:
                await self._request(self._objects.delete([self._path(place)]))
            except FileNotFoundError:
                pass
            except Exception as error:
                self._fail("pages in --kv-remote cannot be deleted", error)
                return

    async def _delete_sessions(self) -> None:
        """Delete the pages of sessions, also those that other servers stored. What fails is tried again."""
        if not self._objects.lists:
            self._report("--kv-remote cannot delete the pages of sessions; they stay until it evicts them")
            self._to_forget.clear()
        for tenant, session in [*self._to_forget]:
            if self._silent:
                return
            try:
                folder = f"{self._root}/{tenant.hex()}/{session.hex()}"
                paths = [each.path async for each in self._listed(folder)]
                for at in range(0, len(paths), _MOST_DELETED):
                    await self._request(self._objects.delete(paths[at : at + _MOST_DELETED]))
            except FileNotFoundError:  # another server deletes them, too; the next listing tells
                continue
            except Exception as error:
                self._fail("pages of a deleted session stay in --kv-remote until it answers", error)
                return
            with self._lock:
                self._forget(tenant, session)
                self._to_forget.pop((tenant, session), None)

    # Listing

    async def _keep_listing(self) -> None:
        while True:
            if not self._silent:
                begun = time.monotonic()
                try:
                    await self._list()
                except Exception as error:
                    self._fail("--kv-remote cannot be read, prompts are computed", error)
                self.listed.set()
            silence = self._silent_until - time.monotonic()  # also if others have found that it fails
            pause = max(LIST_SECONDS, LIST_SHARE * (time.monotonic() - begun))
            await asyncio.sleep(silence if silence > 0 else pause)
            if self._to_forget:
                self._queue.put_nowait(True)

    async def _list(self) -> None:
        """Bring the index up to date. Raises what the store raises."""
        with self._lock:
            self._changed.clear()
        found: dict[bytes, tuple[datetime, _PagePath]] = {}
        digests: dict[str, bytes] = {}  # the same object for the same digest
        async for each in self._listed(self._root):
            place = _page_path(each.path, digests)
            if place is not None and (each.size is None or each.size > self.page_bytes):
                found[place.name] = each.modified, place
        if not self._objects.lists:
            return
        with self._lock:
            here = list(self._index)
        gone = [name for name in here if name not in found]
        come = sorted(entry for name, entry in found.items() if name not in self._index)
        for at in range(0, max(len(gone), len(come)), _SLICE):
            with self._lock:
                for name in gone[at : at + _SLICE]:
                    if name not in self._changed and name not in self._coming:
                        self._index.remove(name)
                for _, (tenant, session, name) in come[at : at + _SLICE]:
                    if name not in self._changed and (tenant, session) not in self._to_forget:
                        weight = self._index.weight(tenant)
                        owner = PageOwner(tenant, weight, b"" if session == NO_SESSION else session)
                        self._index.add(name, _PagePath(tenant, session, name), owner)
            await asyncio.sleep(0)

    async def _listed(self, prefix: str) -> AsyncIterator[StoredObject]:
        """The objects below `prefix`. Raises what the store raises, and TimeoutError if nothing comes."""
        some = self._objects.list(prefix)
        async with contextlib.aclosing(some):
            while (part := await self._request(_next(some))) is not None:
                for each in part:
                    yield each

    # Paths and failures

    @property
    def _root(self) -> str:
        return self._identity.hex()

    def _path(self, place: _PagePath) -> str:
        return "/".join((self._root, *(part.hex() for part in place)))

    async def _request(self, request: Coroutine[Any, Any, Answer]) -> Answer:
        """The answer of the store. Raises what it raises, and TimeoutError if it takes too long."""
        async with asyncio.timeout(REQUEST_SECONDS):
            answer = await request
        self._pauses = 0
        return answer

    def _fail(self, sentence: str, error: Exception) -> None:
        """The store has failed: ask it for nothing for a while."""
        if not self._silent:
            pause = min(FIRST_PAUSE * 2**self._pauses, LONGEST_PAUSE)
            self._pauses += pause < LONGEST_PAUSE
            self._silent_until = time.monotonic() + pause
        why = "it does not answer" if isinstance(error, TimeoutError) else reason(error)
        self._report(sentence, why)

    def _report(self, sentence: str, why: str = "") -> None:
        """Count a failure, and log it the first time."""
        with self._lock:
            self._errors += 1
        if sentence not in self._reported:
            self._reported.add(sentence)
            _log.warning("%s%s", sentence, f": {why}" if why else "")

    def close(self) -> None:
        """See Tier."""
        with self._lock:
            if self._closed:
                return
            self._tell(False)
            self._closed = True
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():  # the store does not answer
            with contextlib.suppress(RuntimeError):  # it has ended now
                self._loop.call_soon_threadsafe(self._work.cancel)
            self._thread.join(1.0)


async def _next(some: AsyncIterator[Sequence[StoredObject]]) -> Sequence[StoredObject] | None:
    return await anext(some, None)


def _page_path(path: str, digests: dict[str, bytes]) -> _PagePath | None:
    """This path as that of a page; None if no page has such a path."""
    parts = path.split("/")[-3:]
    try:
        tenant, session, name = (digests.get(part) or bytes.fromhex(part) for part in parts)
    except ValueError:
        return None
    if (len(tenant), len(session), len(name)) != (DIGEST_BYTES, DIGEST_BYTES, NAME_BYTES):
        return None
    digests[parts[0]], digests[parts[1]] = tenant, session
    return _PagePath(tenant, session, name)
