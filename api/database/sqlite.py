"""The database of one server: an SQLite file in its data directory.

Reads use one connection and take microseconds, so they happen on the event loop. A write opens a connection
of its own, may come from any thread or process, and is on disk when it returns. On a full disk, writes that
free space or revoke access use a reserve (`api/storage.py`).
"""

import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import TypeVar

from personae.api.database.base import Connection
from personae.api.database.schema import LATER_COLUMNS, SQLITE
from personae.api.storage import Reserve, storage_failure, storing
from personae.errors import StorageFailed

T = TypeVar("T")

_BUSY_SECONDS = 5.0


class SqliteDatabase:
    """The database in the file at `path`. Raises OSError or sqlite3.Error if it cannot be made or read."""

    shared = False

    def __init__(self, path: Path, reserve: Path) -> None:
        self._path = path
        self._reserve = Reserve(reserve)
        self._writing = Lock()  # SQLite lets those who wait for another process sleep, so none waits for us
        try:
            self._reader, self.secret = self._open()
        except (OSError, sqlite3.Error) as error:
            if storage_failure(error) is None or not self._reserve.release():
                raise
            self._reader, self.secret = self._open()
        self.keep_reserve()

    def rows(self, query: str, values: Sequence[object] = ()) -> list[sqlite3.Row]:
        """What a select finds. Raises StorageFailed."""
        with storing():
            return self._reader.execute(query, values).fetchall()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection of its own, to read on any thread. Raises StorageFailed."""
        with storing():
            db = self._connect()
            try:
                yield db
            finally:
                db.close()

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction: committed and on disk when the block ends, rolled back when it raises. No other
        transaction, also of another process, runs meanwhile: what the block has read stays true.

        Raises StorageFailed if the disk is full or fails.
        """
        with storing(), self._transaction() as db:
            yield db

    def urgently(self, change: Callable[[Connection], T]) -> T:
        """Make a change in a transaction, with the reserve if the disk is full. Raises StorageFailed if there
        was no reserve either."""
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

    def close(self) -> None:
        """Let go of the file."""
        self._reader.close()
        self.keep_reserve()

    def _open(self) -> tuple[sqlite3.Connection, bytes]:
        """Open the reader, with everything that it needs on the disk; and read the secret."""
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        reader = self._connect()
        try:
            reader.execute("pragma journal_mode = wal")
            with self._transaction() as db:
                for statement in filter(str.strip, SQLITE.split(";")):
                    db.execute(statement)
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
        if not self._writing.acquire(timeout=_BUSY_SECONDS):
            raise StorageFailed("The server's storage is slow. Try again later.")
        try:
            db = self._connect()
            try:
                db.execute("pragma synchronous = full")
                db.execute("begin immediate")  # Python's module begins one with the first change only
                with db:
                    yield db
            finally:
                db.close()
        finally:
            self._writing.release()

    def _connect(self) -> sqlite3.Connection:
        # The reader is created by the thread that opens the directory, and then used only by the event loop's
        # thread.
        db = sqlite3.connect(self._path, timeout=_BUSY_SECONDS, check_same_thread=False)
        try:
            db.row_factory = sqlite3.Row
            db.execute("pragma foreign_keys = on")  # the first that reads the file
        except BaseException:
            db.close()
            raise
        return db


def _add_missing(db: sqlite3.Connection) -> None:
    """Add columns that a directory of an earlier version lacks."""
    for table, column, kind in LATER_COLUMNS:
        if column not in {row["name"] for row in db.execute(f"pragma table_info({table})")}:
            db.execute(f"alter table {table} add column {column} {kind}")
