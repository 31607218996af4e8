"""The data directory: one SQLite file for everything that must survive a restart, and larger files next to
it.

Reads use one connection and take microseconds, so they happen on the event loop. A write opens a connection
of its own, may come from any thread or process, and is on disk when it returns. On a full disk, writes that
free space or revoke access use a reserve (`api/storage.py`).
"""

import fcntl
import os
import secrets
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from personae.api.storage import Reserve, storage_failure, storing
from personae.errors import LoadError, StorageFailed

T = TypeVar("T")

DATABASE = "personae.db"
ADAPTERS = "adapters"
FILES = "files"
BATCHES = "batches"
RESERVE = "reserve"
_BUSY_SECONDS = 5.0

_SCHEMA = """
create table if not exists meta (key text primary key, value blob not null) strict;
create table if not exists tenants (
    name text primary key,
    created integer not null,
    revoked integer,
    limits text not null
) strict;
create table if not exists keys (
    id text primary key,
    tenant text not null references tenants (name),
    role text not null check (role in ('admin', 'tenant')),
    digest blob not null,
    created integer not null,
    revoked integer,
    label text not null default '',
    expires integer,
    used integer
) strict;
create table if not exists usage (
    hour integer not null,
    tenant text not null,
    key text not null,
    adapter text not null,
    requests integer not null,
    prompt integer not null,
    cached integer not null,
    completion integer not null,
    seconds real not null default 0,
    primary key (hour, tenant, key, adapter)
) strict;
create table if not exists responses (
    id text primary key,
    tenant text not null,
    created integer not null,
    previous text,
    bytes integer not null,
    input blob not null,
    response blob not null,
    request blob
) strict;
create table if not exists conversations (
    id text primary key,
    tenant text not null,
    created integer not null,
    metadata text not null,
    bytes integer not null
) strict;
create index if not exists conversations_by_tenant on conversations (tenant);
create table if not exists conversation_items (
    place integer primary key,
    conversation text not null references conversations (id) on delete cascade,
    id text not null,
    bytes integer not null,
    item blob not null,
    unique (conversation, id)
) strict;
create index if not exists items_by_conversation on conversation_items (conversation, bytes);
create index if not exists responses_by_tenant on responses (tenant, bytes);
create index if not exists responses_by_time on responses (created);
create index if not exists keys_by_tenant on keys (tenant);
create table if not exists adapters (
    tenant text not null,
    name text not null,
    id text not null unique,
    version integer not null,
    digest text not null,
    ranks text not null,
    bytes integer not null,
    shared integer not null,
    created integer not null,
    traits text not null default '{}',
    primary key (tenant, name)
) strict;
create index if not exists adapters_by_digest on adapters (digest);
create index if not exists adapters_by_name on adapters (name);
create table if not exists files (
    id text primary key,
    tenant text not null,
    filename text not null,
    purpose text not null,
    bytes integer not null,
    created integer not null,
    expires integer
) strict;
create index if not exists files_by_tenant on files (tenant);
create table if not exists batches (
    id text primary key,
    tenant text not null,
    status text not null,
    entry text not null
) strict;
create index if not exists batches_by_tenant on batches (tenant);
create index if not exists batches_by_status on batches (status);
"""


class DataDir:
    """An open data directory. Raises LoadError if it cannot be created, read or written.

    `adapters` is the folder of adapter contents, `files` that of files by id, `batches` that of unfinished
    batches by id. `secret` is 32 bytes that never leave the directory; what is derived from it stays the same
    across restarts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.adapters = path / ADAPTERS
        self.files = path / FILES
        self.batches = path / BATCHES
        self._reserve = Reserve(path / RESERVE)
        try:
            try:
                self._reader, self.secret = self._open()
            except (OSError, sqlite3.Error) as error:
                if storage_failure(error) is None or not self._reserve.release():
                    raise
                self._reader, self.secret = self._open()
        except (OSError, sqlite3.Error) as error:
            raise LoadError(f"--data-dir {path}: {error}.") from None
        self.keep_reserve()

    def rows(self, query: str, values: tuple[object, ...] = ()) -> list[sqlite3.Row]:
        """What a select finds. Raises StorageFailed."""
        with storing():
            return self._reader.execute(query, values).fetchall()

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A connection of its own, to read on any thread. Raises StorageFailed."""
        with storing():
            db = self._connect()
            try:
                yield db
            finally:
                db.close()

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """A transaction: committed and on disk when the block ends, rolled back when it raises.

        Raises StorageFailed if the disk is full or fails.
        """
        with storing(), self._transaction() as db:
            yield db

    def urgently(self, change: Callable[[sqlite3.Connection], T]) -> T:
        """Make a change in a transaction, with the reserve if the disk is full: for what frees space or
        revokes access. `change` may be called twice. Raises StorageFailed if there was no reserve either."""
        try:
            with self.write() as db:
                return change(db)
        except StorageFailed:
            if not self._reserve.release():
                raise
            with suppress(sqlite3.Error):
                self._empty_log()
            with self.write() as db:
                return change(db)
        finally:
            self.keep_reserve()

    def keep_reserve(self) -> None:
        """Restore the reserve, if there is room for it."""
        self._reserve.keep()

    def _open(self) -> tuple[sqlite3.Connection, bytes]:
        """Open the reader, with everything that it needs on the disk; and read the secret."""
        for folder in (self.adapters, self.files, self.batches):
            folder.mkdir(parents=True, exist_ok=True)
        os.chmod(self.path, 0o700)
        database = self.path / DATABASE
        os.close(os.open(database, os.O_RDWR | os.O_CREAT, 0o600))
        reader = self._connect()
        try:
            with self._transaction() as db:
                db.execute("pragma journal_mode = wal")
                db.executescript(_SCHEMA)
                _add_missing(db)
                db.execute("insert or ignore into meta values ('secret', ?)", (secrets.token_bytes(32),))
            (secret,) = reader.execute("select value from meta where key = 'secret'").fetchone()
        except BaseException:
            reader.close()
            raise
        return reader, secret

    def _empty_log(self) -> None:
        """Move the contents of SQLite's log to the database, which frees the log's room."""
        db = self._connect()
        try:
            db.execute("pragma wal_checkpoint(truncate)")
        finally:
            db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        db = self._connect()
        try:
            db.execute("pragma synchronous = full")
            with db:
                yield db
        finally:
            db.close()

    def close(self) -> None:
        """Let go of the file."""
        self._reader.close()
        self.keep_reserve()

    def _connect(self) -> sqlite3.Connection:
        # The reader is created by the thread that opens the directory, and then used only by the event loop's
        # thread.
        db = sqlite3.connect(self.path / DATABASE, timeout=_BUSY_SECONDS, check_same_thread=False)
        try:
            db.row_factory = sqlite3.Row
            db.execute("pragma foreign_keys = on")  # the first that reads the file
        except BaseException:
            db.close()
            raise
        return db


def _add_missing(db: sqlite3.Connection) -> None:
    """Add columns that a directory of an earlier version lacks."""
    for table, column, kind in (
        ("adapters", "traits", "text not null default '{}'"),
        ("keys", "label", "text not null default ''"),
        ("keys", "expires", "integer"),
        ("keys", "used", "integer"),
        ("usage", "seconds", "real not null default 0"),
        ("responses", "request", "blob"),
    ):
        if column not in {row["name"] for row in db.execute(f"pragma table_info({table})")}:
            db.execute(f"alter table {table} add column {column} {kind}")


@contextmanager
def serving(path: Path | None) -> Iterator[DataDir]:
    """The data directory of a server, which no other may use. Without a path, a temporary one that is deleted
    at the end.

    Raises LoadError if another server uses it.
    """
    if path is None:
        with tempfile.TemporaryDirectory(prefix="personae-") as folder, serving(Path(folder)) as data:
            yield data
        return
    data = DataDir(path)
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LoadError(f"--data-dir {path}: another server is using it.") from None
        yield data
    finally:
        os.close(lock)
        data.close()
