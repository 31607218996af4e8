"""Which tenant has which files, and their contents: a row in the database, and a file named after its id.

The content is on disk before its row, so a row always has its content. A content without a row, left by a
crash in between, is deleted at the next start.

Everything here belongs to the event loop, except what it passes to threads itself.
"""

import os
import secrets
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import msgspec
from anyio import Lock, to_thread

from personae.api.database.base import Connection, TableRow
from personae.api.http.upload import Staging, sync_folder
from personae.api.object_store import ObjectStore
from personae.api.tenants.data import DataDir
from personae.api.tenants.store import Identity
from personae.errors import NotFound, QuotaExceeded, RequestError, StorageFailed
from personae.kernels.sizes import size_text

STAGING = "staging"
CONTENT = "content"
KEPT = (3600, 30 * 24 * 3600)  # seconds for which a file that expires can be stored


class FileRecord(msgspec.Struct, frozen=True):
    """A file, as the API shows it. Times are Unix seconds; null for a file that does not expire."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None
    object: str = "file"
    status: str = "processed"
    status_details: None = None


class FileStore:
    """The files of a data directory. `clock` gives Unix time. `claimed` says how many bytes a tenant's
    running batches will add to its files."""

    def __init__(self, data: DataDir, clock: Callable[[], float] = time.time) -> None:
        self._data = data
        self._clock = clock
        self.claimed: Callable[[str], int] = lambda tenant: 0
        self._lock = Lock()  # from the check of the available room to the row that takes it
        self._bringing = Lock()
        self._staging = Staging(data.files / STAGING)
        known = {row["id"] for row in data.rows("select id from files")}
        for path in data.files.iterdir():
            if path.name not in known and path.name != STAGING:
                path.unlink()

    def close(self) -> None:
        """Wait until all deletions are done."""
        self._staging.close()

    def stage(self, tenant: str) -> AbstractContextManager[Path]:
        """A folder for an upload; see `Staging.folder`."""
        return self._staging.folder(tenant)

    def path(self, id: str) -> Path:
        """The path of a file's content; only for ids of existing records."""
        return self._data.files / id

    async def bring(self, id: str) -> Path:
        """The path of a file's content, from the object store if it is not here. Raises StorageFailed."""
        path, objects = self.path(id), self._data.objects
        if self._data.shared and not path.exists():
            if objects is None:
                raise StorageFailed(
                    "The file's content is at another server, and there is no --object-store."
                )
            async with self._bringing:
                if not path.exists():
                    await to_thread.run_sync(self._fetch, objects, id)
        return path

    def may_be_brought(self, id: str) -> bool:
        """Whether the content is here or can be."""
        return self._data.objects is not None or self.path(id).exists()

    def _fetch(self, objects: ObjectStore, id: str) -> None:
        with self._staging.folder("") as folder:
            objects.get(object_name(id), folder / id)
            os.rename(folder / id / CONTENT, self.path(id))

    def find(self, tenant: str, id: str) -> FileRecord:
        """The tenant's file. Raises NotFound, also for one that has expired."""
        rows = self._data.rows(
            "select * from files where id = ? and tenant = ? and coalesce(expires > ?, true)",
            (id, tenant, self._clock()),
        )
        if not rows:
            raise NotFound(f"There is no file `{id[:80]}`.", param="file_id", code="file_not_found")
        return _record(rows[0])

    def page(
        self, tenant: str, purpose: str | None, after: str | None, limit: int, order: str
    ) -> tuple[list[FileRecord], bool]:
        """A page of the tenant's files in the order of their creation (asc) or the reverse (desc), and
        whether there are more. Raises NotFound for an `after` that is not one of them."""
        compare, direction = (">", "asc") if order == "asc" else ("<", "desc")
        place = None
        if after is not None:
            self.find(tenant, after)
            place = self._data.rows("select rowid from files where id = ?", (after,))[0][0]
        rows = self._data.rows(
            "select * from files where tenant = ? and coalesce(expires > ?, true) "  # noqa: S608  our own words
            "and (? is null or purpose = ?) "
            f"and (? is null or rowid {compare} ?) order by rowid {direction} limit ?",
            (tenant, self._clock(), purpose, purpose, place, place, limit + 1),
        )
        return [_record(row) for row in rows[:limit]], len(rows) > limit

    def check_room(self, who: Identity, size: int, files: int = 1) -> None:
        """Raises QuotaExceeded if the tenant may not have `files` more files, of `size` bytes in all."""
        limits = who.limits
        if limits.file_bytes is None and limits.files is None:
            return
        used, count = self._data.rows(
            "select total(bytes), count(*) from files where tenant = ?", (who.tenant,)
        )[0]
        claimed = self.claimed(who.tenant)
        if limits.file_bytes is not None and used + claimed + size > limits.file_bytes:
            running = f", and its batches that run {size_text(claimed, needed=True)}" if claimed else ""
            raise QuotaExceeded(
                f"This tenant's files have {size_text(int(used), needed=True)} of at most "
                f"{size_text(limits.file_bytes)}{running}; {size_text(size, needed=True)} more do not fit. "
                "Remove one first."
            )
        if limits.files is not None and count + files > limits.files:
            raise QuotaExceeded(f"This tenant has {count} files of at most {limits.files}. Remove one first.")

    async def add(
        self, who: Identity, path: Path, *, filename: str, purpose: str, seconds: int | None
    ) -> FileRecord:
        """Store a staged file, which is on disk when this returns. `seconds` says for how long; None for
        ever.

        Raises QuotaExceeded.
        """
        record = self.record(f"file-{secrets.token_hex(12)}", path, filename, purpose, seconds)
        async with self._lock:
            self.check_room(who, record.bytes)
            await to_thread.run_sync(self._commit, who.tenant, record, path)
        return record

    def record(
        self, id: str, path: Path, filename: str, purpose: str, seconds: int | None = None
    ) -> FileRecord:
        """The new record of the file at `path`."""
        now = int(self._clock())
        expires = None if seconds is None else now + seconds
        return FileRecord(id, path.stat().st_size, now, filename, purpose, expires)

    def take(self, record: FileRecord, path: Path) -> None:
        """Put the content in its place, without its row. The one at `path` stays. Can be repeated."""
        target = self.path(record.id)
        target.unlink(missing_ok=True)
        os.link(path, target)
        sync_folder(self._data.files)
        if self._data.objects is not None:
            self._data.objects.put(object_name(record.id), {CONTENT: target})

    def insert(self, db: Connection, tenant: str, record: FileRecord) -> None:
        """Insert the row for a content that is in its place."""
        db.execute(
            "insert into files (id, tenant, filename, purpose, bytes, created, expires) "
            "values (?, ?, ?, ?, ?, ?, ?)",
            (
                record.id,
                tenant,
                record.filename,
                record.purpose,
                record.bytes,
                record.created_at,
                record.expires_at,
            ),
        )

    async def remove(self, tenant: str, id: str) -> None:
        """Delete a file. Readers that have it open can finish. Raises NotFound."""
        self.find(tenant, id)
        await to_thread.run_sync(self._delete, [id])

    async def sweep(self, needed: Collection[str]) -> None:
        """Delete expired files that are not needed any more."""
        rows = self._data.rows("select id from files where expires <= ?", (self._clock(),))
        if gone := [row["id"] for row in rows if row["id"] not in needed]:
            await to_thread.run_sync(self._delete, gone)

    def _commit(self, tenant: str, record: FileRecord, path: Path) -> None:
        try:
            self.take(record, path)
            with self._data.write() as db:
                self.insert(db, tenant, record)
        except BaseException:
            self.path(record.id).unlink(missing_ok=True)
            raise

    def _delete(self, ids: list[str]) -> None:
        gone = [(id,) for id in ids]
        self._data.urgently(lambda db: db.executemany("delete from files where id = ?", gone))
        for id in ids:
            self.path(id).unlink(missing_ok=True)
            if self._data.objects is not None:
                with suppress(StorageFailed):  # it only takes room
                    self._data.objects.delete(object_name(id))


def object_name(id: str) -> str:
    """The name of a file's content in an object store, where it is the only file, `CONTENT`."""
    return f"files/{id}"


def expiry(seconds: int, param: str) -> int:
    """When a file expires. Raises RequestError."""
    least, most = KEPT
    if not least <= seconds <= most:
        raise RequestError(f"`{param}` must be from {least} to {most}.", param=param, code="out_of_range")
    return seconds


def _record(row: TableRow) -> FileRecord:
    return FileRecord(
        row["id"], row["bytes"], row["created"], row["filename"], row["purpose"], row["expires"]
    )
