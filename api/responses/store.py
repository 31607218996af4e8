"""Stored responses, so that clients can continue a conversation from one or fetch it again.

A response is in memory at once, and on disk within half a second: a thread writes all new ones in one
transaction.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from personae.api.database.base import Connection, Row
from personae.api.responses.answers import Response
from personae.api.responses.conversations import ConversationStore
from personae.api.responses.item_ids import response_of, unknown_item
from personae.api.responses.items import Item
from personae.api.tenants.data import DataDir
from personae.api.tenants.flusher import flushed
from personae.errors import NotFound, Overloaded, RequestError, StorageFailed

if TYPE_CHECKING:
    from personae.api.responses.background import BackgroundResponses

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 0.5
_SHARED_FLUSH_SECONDS = 0.1  # the next request may reach another server
_LATER_SECONDS = 0.4
KEPT_SECONDS = 30 * 86400
DEFAULT_BYTES = 256 * 2**20
"""What a tenant's responses may take if its limits do not say. The oldest are removed beyond that."""
_MOST_WAITING = 64 * 2**20
_PRUNED_TO = 0.9
_SWEEP_SECONDS = 3600.0

_ID = re.compile(r"resp_[0-9a-f]{16,64}")
_decode_items = msgspec.json.Decoder(list[Item]).decode


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response as it is kept: its JSON, the items that its request added, and the response before it.
    `request` is the JSON of a request in the background that is not answered yet."""

    tenant: str
    id: str
    previous: str | None
    input: bytes
    response: bytes
    request: bytes | None = None

    @property
    def size(self) -> int:
        """Bytes that count for the tenant."""
        return len(self.input) + len(self.response) + len(self.request or b"")


class _Output(msgspec.Struct):
    output: list[Item]


class ResponseStore:
    """The responses of a data directory, and its `conversations`. `clock` gives Unix time."""

    def __init__(self, data: DataDir, clock: Callable[[], float] = time.time) -> None:
        self.conversations = ConversationStore(data, clock)
        self.background: BackgroundResponses | None = None  # while it runs
        self.shared = data.shared
        self._data = data
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[str, KeptResponse] = {}
        self._bytes = 0
        self._limits: dict[str, int] = {}
        self._swept = 0.0

    @property
    def full(self) -> bool:
        """Whether the disk is so far behind that no more can be stored now."""
        return self._bytes > _MOST_WAITING

    def check_room(self) -> None:
        """Raises Overloaded while the disk is far behind."""
        if self.full:
            raise Overloaded("Responses wait to be stored; try again later, or with `store` false.")

    def keep(
        self,
        tenant: str,
        limit: int | None,
        response: Response,
        input: bytes,
        request: bytes | None = None,
    ) -> None:
        """Store a response of a tenant that may have `limit` bytes of them. It replaces the one with its id.
        With a `request` it is not answered yet."""
        previous = response.previous_response_id
        one = KeptResponse(tenant, response.id, previous, input, msgspec.json.encode(response), request)
        self.put(one, limit)

    def put(self, one: KeptResponse, limit: int | None) -> None:
        """Store a response of a tenant that may have `limit` bytes of them."""
        with self._lock:
            self._put(one)
            self._limits[one.tenant] = DEFAULT_BYTES if limit is None else limit

    def keep_again(
        self, before: KeptResponse, response: Response, request: bytes | None = None
    ) -> KeptResponse:
        """Put a response in the place of what was kept of it so far."""
        one = replace(before, response=msgspec.json.encode(response), request=request)
        with self._lock:
            self._put(one)
        return one

    def _put(self, one: KeptResponse) -> None:
        if (before := self._waiting.pop(one.id, None)) is not None:
            self._bytes -= before.size
        self._waiting[one.id] = one
        self._bytes += one.size

    def find(self, tenant: str, id: str) -> KeptResponse:
        """The tenant's response. Raises NotFound."""
        one = self._waiting.get(id)
        if one is not None and one.tenant == tenant:
            return one
        row = self._stored(tenant, id)
        if row is None and self._data.shared and _ID.fullmatch(id):
            time.sleep(_LATER_SECONDS)  # another server may be about to write it
            row = self._stored(tenant, id)
        if row is None:
            raise NotFound(f"There is no response `{id[:80]}`.", param="id", code="response_not_found")
        return KeptResponse(tenant, id, *row)

    def _stored(self, tenant: str, id: str) -> Row | None:
        with self._data.read() as db:
            found: Row | None = db.execute(
                "select previous, input, response, request from responses where id = ? and tenant = ?",
                (id, tenant),
            ).fetchone()
            return found

    def unanswered(self) -> list[tuple[str, str]]:
        """The tenants and ids of stored responses that are not answered yet and that no other server works
        on, the oldest first. With a shared database this server has them from now on."""
        with self._data.read() as db:
            query = "select tenant, id from responses where request is not null order by rowid"
            found = [(row["tenant"], row["id"]) for row in db.execute(query)]
        if self._data.leases is None:
            return found
        taken = self._data.leases.take([id for _, id in found])
        return [(tenant, id) for tenant, id in found if id in taken]

    def ended_by_others(self, ids: Collection[str]) -> set[str]:
        """Those of this server's unanswered responses that another server has cancelled, or taken over."""
        with self._lock:
            stored = set(ids) - self._waiting.keys()
        if not stored or self._data.leases is None:
            return set()
        return self._data.leases.lost(stored)

    def conversation(self, tenant: str, id: str, most: int) -> list[Item]:
        """All items up to and including a response. Raises RequestError if it, or one before it, does not
        exist, or if there are more than `most`."""
        turns: list[list[Item]] = []
        count, next_id = 0, id
        while next_id:
            try:
                one = self.find(tenant, next_id)
            except NotFound:
                gone = "" if next_id == id else f", on which `{id[:80]}` depends"
                raise RequestError(
                    f"There is no response `{next_id[:80]}`{gone}.",
                    param="previous_response_id",
                    code="previous_response_not_found",
                ) from None
            output = msgspec.json.decode(one.response, type=_Output).output
            turns.append([*_decode_items(one.input), *output])
            count += len(turns[-1])
            if count > most:
                raise RequestError(
                    f"The conversation has more than {most} items.", param="previous_response_id"
                )
            next_id = one.previous or ""
        return [item for turn in reversed(turns) for item in turn]

    def items(self, tenant: str, ids: Mapping[str, str]) -> dict[str, Item]:
        """The tenant's items, by id; `ids` has the field that names each. Raises RequestError for one that is
        not stored."""
        found: dict[str, Item] = {}
        seen: set[str] = set()
        for id, field in ids.items():
            response = response_of(id)
            if response is not None and response not in seen:
                seen.add(response)
                with suppress(NotFound):
                    one = self.find(tenant, response)
                    output = msgspec.json.decode(one.response, type=_Output).output
                    found |= {item.id: item for item in [*_decode_items(one.input), *output] if item.id}
            if id not in found:
                raise unknown_item(id, field)
        return {id: found[id] for id in ids}

    def remove(self, tenant: str, id: str) -> None:
        """Delete a response. Raises NotFound."""
        self.find(tenant, id)
        with self._lock:
            if (waiting := self._waiting.pop(id, None)) is not None:
                self._bytes -= waiting.size

        def change(db: Connection) -> None:
            db.execute("delete from responses where id = ?", (id,))
            if self._data.leases is not None:
                self._data.leases.end(db, id)

        self._data.urgently(change)

    @contextmanager
    def running(self) -> Iterator["ResponseStore"]:
        """Write new responses while the block runs, and when it ends."""
        often = _SHARED_FLUSH_SECONDS if self._data.shared else FLUSH_SECONDS
        with flushed("responses", self.flush, often, logger), self.conversations.running():
            yield self

    def flush(self) -> None:
        """Write new responses, and remove those that are too old or too many. Raises StorageFailed."""
        with self._lock:
            waiting, limits, self._limits = list(self._waiting.values()), self._limits, {}
        now = self._clock()
        if not waiting and now - self._swept < _SWEEP_SECONDS:
            return
        try:
            with self._data.write() as db:
                db.executemany(_KEEP, [_row(one, int(now)) for one in waiting])
                if (leases := self._data.leases) is not None:
                    for one in waiting:
                        (leases.end if one.request is None else leases.begin)(db, one.id)
                db.execute("delete from responses where created < ?", (int(now) - KEPT_SECONDS,))
                for tenant, limit in limits.items():
                    (used,) = db.execute(
                        "select coalesce(sum(bytes), 0) from responses where tenant = ?", (tenant,)
                    ).fetchone()
                    if used > limit:
                        db.execute(_PRUNE, (tenant, limit * _PRUNED_TO))
        except StorageFailed:
            with self._lock:
                self._limits = limits | self._limits
            raise
        self._swept = now
        removed = []
        with self._lock:
            for one in waiting:
                latest = self._waiting.get(one.id)
                if latest is None:
                    removed.append((one.id,))  # while it was being written
                elif latest is one:
                    del self._waiting[one.id]
                    self._bytes -= one.size
        if removed:
            with self._data.write() as db:
                db.executemany("delete from responses where id = ?", removed)


def _row(one: KeptResponse, now: int) -> tuple[object, ...]:
    return one.id, one.tenant, now, one.previous, one.size, one.input, one.response, one.request


_KEEP = (
    "insert into responses (id, tenant, created, previous, bytes, input, response, request) "
    "values (?, ?, ?, ?, ?, ?, ?, ?) on conflict (id) do update set "
    "bytes = excluded.bytes, response = excluded.response, request = excluded.request "
    "where responses.request is not null"  # one that has ended stays as it is
)
_PRUNE = (
    "delete from responses where rowid in (select rowid from (select rowid, "
    "sum(bytes) over (order by rowid desc) as kept from responses where tenant = ?) as sized where kept > ?)"
)
"""Keeps a tenant's newest responses, up to so many bytes."""
