"""The data directory: larger files, and the database of everything that must survive a restart.

The database is an SQLite file in the directory, or a PostgreSQL database that several servers share. Each
server has a directory of its own.
"""

import fcntl
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from personae.api.database.base import Connection, Database, TableRow
from personae.api.database.leases import Leases
from personae.api.database.sqlite import SqliteDatabase
from personae.api.object_store import ObjectStore
from personae.api.tenants.flusher import WriteFailures
from personae.errors import LoadError

if TYPE_CHECKING:
    from personae.api.database.postgres import PostgresDatabase

T = TypeVar("T")

DATABASE = "personae.db"
MIRROR = "mirror.db"
ADAPTERS = "adapters"
FILES = "files"
BATCHES = "batches"
RESERVE = "reserve"
CACHE_BYTES = 20 * 2**30


class DataDir:
    """An open data directory. With a `database_url` its records are in that PostgreSQL database. Raises
    LoadError if it cannot be created, read or written, or if the database does not answer.

    `adapters` is the folder of adapter contents, `files` that of files by id, `batches` that of unfinished
    batches by id. `secret` is 32 bytes that never leave the database; what is derived from it stays the same
    across restarts. `shared`: other servers may use the database at the same time; `leases` then say which
    of them does what. `follow`: learn what they write. `objects` has the contents of adapters and files for
    all of them; of adapters' at most `cache_bytes` are also here. `failures` counts writes
    that failed.
    """

    def __init__(
        self,
        path: Path,
        database_url: str | None = None,
        *,
        follow: bool = True,
        objects: ObjectStore | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.path = path
        self.objects = objects
        self.cache_bytes = cache_bytes
        self.failures = WriteFailures()
        self.adapters = path / ADAPTERS
        self.files = path / FILES
        self.batches = path / BATCHES
        try:
            self._check_kind(database_url)
            for folder in (self.adapters, self.files, self.batches):
                folder.mkdir(parents=True, exist_ok=True)
            os.chmod(path, 0o700)
            self._database: Database = (
                SqliteDatabase(path / DATABASE, path / RESERVE)
                if database_url is None
                else open_postgres(database_url, path / MIRROR, follow=follow)
            )
        except (OSError, sqlite3.Error) as error:
            raise LoadError(f"--data-dir {path}: {error}.") from None
        self.secret = self._database.secret
        self.shared = self._database.shared
        self.leases = Leases(self._database, self.failures) if self.shared else None

    def rows(self, query: str, values: Sequence[object] = ()) -> Sequence[TableRow]:
        """What a select finds; see `Database.rows`. Raises StorageFailed."""
        return self._database.rows(query, values)

    def read(self) -> AbstractContextManager[Connection]:
        """A connection to read; see `Database.read`. Raises StorageFailed."""
        return self._database.read()

    def write(self) -> AbstractContextManager[Connection]:
        """A transaction; see `Database.write`. Raises StorageFailed."""
        return self._database.write()

    def urgently(self, change: Callable[[Connection], T]) -> T:
        """Make a change in a transaction, with the reserve if the disk is full: for what frees space or
        revokes access. `change` may be called twice. Raises StorageFailed if there was no reserve either."""
        return self._database.urgently(change)

    def keep_reserve(self) -> None:
        """Restore the reserve, if there is room for it."""
        self._database.keep_reserve()

    def close(self) -> None:
        """Let go of the database."""
        self._database.close()

    def _check_kind(self, database_url: str | None) -> None:
        """Contents without a record are deleted, so a directory stays with the database that it began with.
        Raises LoadError."""
        if database_url is not None and (self.path / DATABASE).exists():
            raise LoadError(
                f"--data-dir {self.path} has a database of its own, {DATABASE}; give --database-url another "
                "folder, or move the records with `personae database migrate`."
            )
        if database_url is None and (self.path / MIRROR).exists():
            raise LoadError(f"--data-dir {self.path} was used with --database-url; give that too.")


def open_postgres(url: str, mirror: Path, *, follow: bool) -> "PostgresDatabase":
    """The database at `url`; see `PostgresDatabase`. Raises LoadError, also if there is no driver for it."""
    try:
        from personae.api.database.postgres import PostgresDatabase
    except ImportError as error:
        raise LoadError(
            f"--database-url needs psycopg (pip install 'psycopg[binary]'): {str(error).splitlines()[0]}."
        ) from None
    return PostgresDatabase(url, mirror, follow=follow)


@contextmanager
def serving(
    path: Path | None,
    database_url: str | None = None,
    object_store: str | None = None,
    cache_bytes: int | None = None,
) -> Iterator[DataDir]:
    """The data directory of a server, which no other may use. Without a path, a temporary one that is deleted
    at the end.

    Raises LoadError if another server uses it.
    """
    if path is None:
        if database_url is not None or object_store is not None:
            raise LoadError(
                "--database-url and --object-store need --data-dir, for the contents of adapters and files."
            )
        with tempfile.TemporaryDirectory(prefix="personae-") as folder, serving(Path(folder)) as data:
            yield data
        return
    if object_store is not None and database_url is None:
        raise LoadError("--object-store is for servers that share a database: give --database-url too.")
    with locked(path):
        objects = None if object_store is None else ObjectStore(object_store)
        data = DataDir(path, database_url, objects=objects, cache_bytes=cache_bytes or CACHE_BYTES)
        try:
            yield data
        finally:
            data.close()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other servers out of a data directory. Raises LoadError if one uses it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise LoadError(f"--data-dir {path}: {error}.") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LoadError(f"--data-dir {path}: another server is using it.") from None
        yield
    finally:
        os.close(lock)
