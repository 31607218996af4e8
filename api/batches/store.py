"""The batches of a data directory. Writes are on disk when they return."""

import secrets
from collections.abc import Callable

import msgspec
from anyio import Lock, to_thread
from msgspec.structs import replace

from personae.api.batches.model import MOVES, Batch, BatchEntry, Status
from personae.api.batches.shared_journal import forget
from personae.api.database.base import Connection
from personae.api.files.store import FileRecord, FileStore
from personae.api.tenants.data import DataDir
from personae.errors import NotFound

_ALL = 2**62  # rows: a limit that is none
_decode = msgspec.json.Decoder(BatchEntry).decode


class BatchStore:
    """Stores entries. Changes are made one at a time, so they do not overwrite each other."""

    def __init__(self, data: DataDir, files: FileStore, clock: Callable[[], float]) -> None:
        self._data = data
        self._files = files
        self._clock = clock
        self._lock = Lock()

    def find(self, tenant: str, id: str) -> BatchEntry:
        """The tenant's batch. Raises NotFound."""
        rows = self._data.rows("select entry from batches where id = ? and tenant = ?", (id, tenant))
        if not rows:
            raise _no_batch(id)
        return _decode(rows[0][0])

    def page(self, tenant: str, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """A page of the tenant's batches, the newest first, and whether there are more. Raises NotFound."""
        place = None
        if after is not None:
            self.find(tenant, after)
            place = self._data.rows("select rowid from batches where id = ?", (after,))[0][0]
        rows = self._data.rows(
            "select entry from batches where tenant = ? and (? is null or rowid < ?) "
            "order by rowid desc limit ?",
            (tenant, place, place, limit + 1),
        )
        return [_decode(row[0]).batch for row in rows[:limit]], len(rows) > limit

    def unfinished(self, tenant: str | None = None) -> list[BatchEntry]:
        """All unfinished batches, the oldest first, of one tenant or of all."""
        marks = ", ".join("?" * len(MOVES))
        rows = self._data.rows(
            f"select entry from batches where status in ({marks}) "  # noqa: S608  question marks
            "and (? is null or tenant = ?) order by rowid",
            (*MOVES, tenant, tenant),
        )
        return [_decode(row[0]) for row in rows]

    async def add(self, entry: BatchEntry, most_ended: int, *, mine: bool = True) -> None:
        """Store a new batch, which this server runs if it is `mine`. Of the tenant's ended ones only the
        newest `most_ended` stay."""
        await to_thread.run_sync(self._insert, entry, most_ended, mine)

    async def move(self, entry: BatchEntry, status: Status, **changes: object) -> BatchEntry:
        """Give the batch its next status, and apply `changes`. Returns the batch as it is now.

        Does nothing if that status cannot follow, because another change was faster.
        """
        async with self._lock:
            return await to_thread.run_sync(self._move, entry, status, changes, (), self._clock())

    async def finish(
        self, entry: BatchEntry, files: tuple[FileRecord, ...], status: Status, **changes: object
    ) -> BatchEntry:
        """Finish the batch: the rows of its files, whose contents are in place, and its last status, in one
        transaction."""
        async with self._lock:
            return await to_thread.run_sync(self._move, entry, status, changes, files, self._clock())

    def _insert(self, entry: BatchEntry, most_ended: int, mine: bool) -> None:
        marks = ", ".join("?" * len(MOVES))
        with self._data.write() as db:
            batch = entry.batch
            db.execute(
                "insert into batches (id, tenant, status, entry) values (?, ?, ?, ?)",
                (batch.id, entry.tenant, batch.status, msgspec.json.encode(entry).decode()),
            )
            if mine and self._data.leases is not None:
                self._data.leases.begin(db, batch.id)
            db.execute(
                "delete from batches where rowid in (select rowid from batches where tenant = ? "  # noqa: S608  question marks
                f"and status not in ({marks}) order by rowid desc limit {_ALL} offset ?)",
                (entry.tenant, *MOVES, most_ended),
            )

    def _move(
        self,
        entry: BatchEntry,
        status: Status,
        changes: dict[str, object],
        files: tuple[FileRecord, ...],
        at: float,
    ) -> BatchEntry:
        id, leases = entry.batch.id, self._data.leases
        given = {name: value for name, value in changes.items() if name != "ending"}

        def change(db: Connection) -> BatchEntry:
            if leases is not None and status != "cancelling":  # which any server may ask for
                leases.check(db, id)
            row = db.execute("select entry from batches where id = ?", (id,)).fetchone()
            if row is None:
                raise _no_batch(id)
            now = _decode(row[0])
            if status not in MOVES.get(now.batch.status, ()):
                return now
            ending = changes.get("ending", now.ending)
            now = replace(now, batch=now.batch.moved(status, at, **given), ending=ending)
            for record in files:
                self._files.insert(db, entry.tenant, record)
            db.execute(
                "update batches set status = ?, entry = ? where id = ?",
                (status, msgspec.json.encode(now).decode(), id),
            )
            if leases is not None and status not in MOVES:
                leases.end(db, id)
                forget(db, id)
            return now

        if status == "cancelling":  # also on a full disk: a cancelled batch does not fill it any further
            return self._data.urgently(change)
        with self._data.write() as db:
            return change(db)


def _no_batch(id: str) -> NotFound:
    return NotFound(f"There is no batch `{id[:80]}`.", param="batch_id", code="batch_not_found")


def new_id(kind: str) -> str:
    """An unused id."""
    return f"{kind}_{secrets.token_hex(12)}"
