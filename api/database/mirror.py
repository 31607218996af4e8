"""A copy of a shared database's small tables, in an SQLite file of this server's own.

The event loop reads the copy, so it never waits for the network, and a server answers for a while when its
database does not. Every change that the copy has not seen yet has a number above `seq`.
"""

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from personae.api.database.schema import MIRRORED, SQLITE, mirrored_columns

Rows = Iterable[Sequence[Any]]


@dataclass(frozen=True)
class Changes:
    """Changes up to the number `last`: the keys of changed rows by table, and those rows that still exist."""

    last: int
    keys: Mapping[str, set[str]]
    rows: Mapping[str, Rows]


class Mirror:
    """A new copy in the file at `path`. Any thread may call it, but `rows` is for the one that made it."""

    def __init__(self, path: Path) -> None:
        for end in ("", "-wal", "-shm"):
            path.with_name(path.name + end).unlink(missing_ok=True)
        self._path = path
        self._lock = Lock()
        self.seq = -1  # nothing was copied yet
        with closing(self._connect()) as db:
            db.execute("pragma journal_mode = wal")
            db.executescript(f"begin; {SQLITE} commit")
            self.columns = {
                table: mirrored_columns(
                    table, [row["name"] for row in db.execute(f"pragma table_info({table})")]
                )
                for table in MIRRORED
            }
        self._reader = self._connect()

    def rows(self, query: str, values: Sequence[object] = ()) -> list[sqlite3.Row]:
        """What a select finds."""
        return self._reader.execute(query, values).fetchall()

    def load(self, seq: int, tables: Mapping[str, Rows], *, older: bool = False) -> bool:
        """Replace everything by these rows, as they were after the change number `seq`. If the copy has newer
        ones already, only with `older`. Returns whether it did."""
        with self._lock, closing(self._connect()) as db:
            if seq < self.seq and not older:
                return False
            with db:
                for table, rows in tables.items():
                    db.execute(f"delete from {table}")  # noqa: S608  our own words
                    self._insert(db, table, rows)
            self.seq = seq
            return True

    def apply(self, changes: Changes) -> None:
        """Take over changes. Those that are older than what was taken over before are left out."""
        with self._lock:
            if changes.last <= self.seq:
                return
            with closing(self._connect()) as db, db:
                for table, keys in changes.keys.items():
                    delete = f"delete from {table} where {MIRRORED[table]} = ?"  # noqa: S608  our own words
                    db.executemany(delete, [(key,) for key in keys])
                    self._insert(db, table, changes.rows[table])
            self.seq = changes.last

    def close(self) -> None:
        """Let go of the file."""
        self._reader.close()

    def _insert(self, db: sqlite3.Connection, table: str, rows: Rows) -> None:
        names = self.columns[table]
        marks = ", ".join("?" * len(names))
        query = f"insert or replace into {table} ({', '.join(names)}) values ({marks})"  # noqa: S608  our own words
        db.executemany(query, rows)

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, check_same_thread=False)
        db.row_factory = sqlite3.Row
        db.execute("pragma synchronous = off")  # it is made anew at every start
        return db
