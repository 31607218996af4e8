"""Stored responses, so that clients can continue a conversation from one or fetch it again.

A response is in memory at once, and on disk within half a second: a thread writes all new ones in one
transaction.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from personae.api.responses.answers import Response
from personae.api.responses.items import Item
from personae.api.tenants.data import DataDir
from personae.api.tenants.flusher import flushed
from personae.errors import NotFound, Overloaded, RequestError, StorageFailed

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 0.5
KEPT_SECONDS = 30 * 86400
DEFAULT_BYTES = 256 * 2**20
"""What a tenant's responses may take if its limits do not say. The oldest are removed beyond that."""
_MOST_WAITING = 64 * 2**20
_PRUNED_TO = 0.9
_SWEEP_SECONDS = 3600.0

_decode_items = msgspec.json.Decoder(list[Item]).decode


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A stored response: its JSON, the items that its request added, and the previous response."""

    tenant: str
    id: str
    previous: str | None
    input: bytes
    response: bytes

    @property
    def size(self) -> int:
        """Bytes that count for the tenant."""
        return len(self.input) + len(self.response)


class _Output(msgspec.Struct):
    output: list[Item]


class ResponseStore:
    """The responses of a data directory. `clock` gives Unix time."""

    def __init__(self, data: DataDir, clock: Callable[[], float] = time.time) -> None:
        self._data = data
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[str, KeptResponse] = {}
        self._bytes = 0
        self._limits: dict[str, int] = {}
        self._swept = 0.0

    def check_room(self) -> None:
        """Raises Overloaded while the disk is far behind."""
        if self._bytes > _MOST_WAITING:
            raise Overloaded("Responses wait to be stored; try again later, or with `store` false.")

    def keep(self, tenant: str, limit: int | None, response: Response, input: bytes) -> None:
        """Store a response of a tenant that may have `limit` bytes of them."""
        previous = response.previous_response_id
        one = KeptResponse(tenant, response.id, previous, input, msgspec.json.encode(response))
        with self._lock:
            self._waiting[one.id] = one
            self._bytes += one.size
            self._limits[tenant] = DEFAULT_BYTES if limit is None else limit

    def find(self, tenant: str, id: str) -> KeptResponse:
        """The tenant's response. Raises NotFound."""
        one = self._waiting.get(id)
        if one is not None and one.tenant == tenant:
            return one
        with self._data.read() as db:
            row = db.execute(
                "select previous, input, response from responses where id = ? and tenant = ?", (id, tenant)
            ).fetchone()
        if row is None:
            raise NotFound(f"There is no response `{id[:80]}`.", param="id", code="response_not_found")
        return KeptResponse(tenant, id, row["previous"], row["input"], row["response"])

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

    def remove(self, tenant: str, id: str) -> None:
        """Delete a response. Raises NotFound."""
        self.find(tenant, id)
        with self._lock:
            if (waiting := self._waiting.pop(id, None)) is not None:
                self._bytes -= waiting.size
        self._data.urgently(lambda db: db.execute("delete from responses where id = ?", (id,)))

    @contextmanager
    def running(self) -> Iterator["ResponseStore"]:
        """Write new responses while the block runs, and when it ends."""
        with flushed("responses", self.flush, FLUSH_SECONDS, logger):
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
                db.executemany(
                    "insert into responses values (?, ?, ?, ?, ?, ?, ?)",
                    [
                        (one.id, one.tenant, int(now), one.previous, one.size, one.input, one.response)
                        for one in waiting
                    ],
                )
                db.execute("delete from responses where created < ?", (int(now) - KEPT_SECONDS,))
                for tenant, limit in limits.items():
                    (used,) = db.execute(
                        "select total(bytes) from responses where tenant = ?", (tenant,)
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
                if self._waiting.pop(one.id, None) is None:
                    removed.append((one.id,))  # while it was being written
                else:
                    self._bytes -= one.size
        if removed:
            with self._data.write() as db:
                db.executemany("delete from responses where id = ?", removed)


_PRUNE = (
    "delete from responses where rowid in (select rowid from (select rowid, "
    "sum(bytes) over (order by rowid desc) as kept from responses where tenant = ?) where kept > ?)"
)
"""Keeps a tenant's newest responses, up to so many bytes."""
