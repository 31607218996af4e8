"""Stored responses, so that clients can continue a conversation from one or fetch it again.

A response is on disk before its client learns that it is complete, or that it is queued. The items that it
adds to a conversation are stored in the same transaction.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec

from personae.api.database.base import Connection
from personae.api.database.group_commit import GroupCommit
from personae.api.responses.conversations import ConversationStore
from personae.api.responses.item_ids import response_of, unknown_item
from personae.api.responses.items import Item
from personae.api.responses.kept_items import KeptItem
from personae.api.tenants.data import DataDir
from personae.api.tenants.flusher import flushed
from personae.errors import NotFound, RequestError

logger = logging.getLogger(__name__)

KEPT_SECONDS = 30 * 86400
DEFAULT_BYTES = 256 * 2**20
"""What a tenant's responses may take if its limits do not say. The oldest are removed beyond that."""
_PRUNED_TO = 0.9
_PRUNE_SECONDS = 0.5
_SWEEP_SECONDS = 3600.0

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


@dataclass(frozen=True, slots=True)
class AddedItems:
    """The items that a response adds to the conversation `id`."""

    id: str
    items: list[KeptItem]


class _Output(msgspec.Struct):
    output: list[Item]


class ResponseStore:
    """The responses of a data directory, and its `conversations`. `clock` gives Unix time.

    `check_background` raises QuotaExceeded if a tenant has no room for another response in the background.
    It is None while nothing runs these.
    """

    def __init__(self, data: DataDir, clock: Callable[[], float] = time.time) -> None:
        self.conversations = ConversationStore(data, clock)
        self.check_background: Callable[[str], None] | None = None
        self.shared = data.shared
        self._data = data
        self._clock = clock
        self._commits = GroupCommit(data, "responses")
        self._lock = threading.Lock()
        self._limits: dict[str, int] = {}
        self._swept = 0.0

    async def put(self, one: KeptResponse | None, limit: int | None, added: AddedItems | None = None) -> None:
        """Store a new response of a tenant that may have `limit` bytes of them, or only what it adds to a
        conversation. Raises StorageFailed."""

        def change(db: Connection) -> None:
            if one is not None:
                db.execute(_PUT, _row(one, int(self._clock())))
                if self._data.leases is not None and one.request is not None:
                    self._data.leases.begin(db, one.id)
            if added is not None:
                self.conversations.append(db, added.id, added.items)

        await self._commits.write(change)
        if one is not None:
            with self._lock:
                self._limits[one.tenant] = DEFAULT_BYTES if limit is None else limit

    async def update(self, one: KeptResponse, added: AddedItems | None = None) -> None:
        """Store what became of a response that was not answered yet. One that has ended, or was deleted,
        stays so, and adds nothing. Raises StorageFailed."""
        await self._commits.write(lambda db: self._update(db, one, added))

    def end(self, one: KeptResponse) -> KeptResponse:
        """Store the end of a response that is cancelled, also on a full disk. Returns it as it is then. For
        threads. Raises NotFound or StorageFailed."""
        self._data.urgently(lambda db: self._update(db, one, None))
        return self.find(one.tenant, one.id)

    def _update(self, db: Connection, one: KeptResponse, added: AddedItems | None) -> None:
        if not db.execute(_UPDATE, (one.size, one.response, one.request, one.id)).rowcount:
            return
        if self._data.leases is not None and one.request is None:
            self._data.leases.end(db, one.id)
        if added is not None:
            self.conversations.append(db, added.id, added.items)

    def find(self, tenant: str, id: str) -> KeptResponse:
        """The tenant's response. For threads. Raises NotFound."""
        with self._data.read() as db:
            row = db.execute(
                "select previous, input, response, request from responses where id = ? and tenant = ?",
                (id, tenant),
            ).fetchone()
        if row is None:
            raise NotFound(f"There is no response `{id[:80]}`.", param="id", code="response_not_found")
        return KeptResponse(tenant, id, *row)

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
        return set() if self._data.leases is None else self._data.leases.lost(ids)

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

        def change(db: Connection) -> None:
            db.execute("delete from responses where id = ?", (id,))
            if self._data.leases is not None:
                self._data.leases.end(db, id)

        self._data.urgently(change)

    @contextmanager
    def running(self) -> Iterator["ResponseStore"]:
        """Keep tenants within their limits while the block runs."""
        with flushed("old responses", self.prune, _PRUNE_SECONDS, logger, self._data.failures):
            yield self

    def prune(self) -> None:
        """Remove responses that are too old or too many. Raises StorageFailed."""
        with self._lock:
            limits, self._limits = self._limits, {}
        now = self._clock()
        sweeps = now - self._swept >= _SWEEP_SECONDS
        if not limits and not sweeps:
            return
        try:
            with self._data.write() as db:
                if sweeps:
                    db.execute("delete from responses where created < ?", (int(now) - KEPT_SECONDS,))
                for tenant, limit in limits.items():
                    (used,) = db.execute(
                        "select coalesce(sum(bytes), 0) from responses where tenant = ?", (tenant,)
                    ).fetchone()
                    if used > limit:
                        db.execute(_PRUNE, (tenant, limit * _PRUNED_TO))
        except BaseException:
            with self._lock:
                self._limits = limits | self._limits
            raise
        if sweeps:
            self._swept = now


def _row(one: KeptResponse, now: int) -> tuple[object, ...]:
    return one.id, one.tenant, now, one.previous, one.size, one.input, one.response, one.request


_PUT = (
    "insert into responses (id, tenant, created, previous, bytes, input, response, request) "
    "values (?, ?, ?, ?, ?, ?, ?, ?)"
)
_UPDATE = "update responses set bytes = ?, response = ?, request = ? where id = ? and request is not null"
_PRUNE = (
    "delete from responses where rowid in (select rowid from (select rowid, "
    "sum(bytes) over (order by rowid desc) as kept from responses where tenant = ?) as sized where kept > ?)"
)
"""Keeps a tenant's newest responses, up to so many bytes."""
