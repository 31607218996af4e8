"""A PostgreSQL database that several servers share.

The event loop reads this server's copy of the small tables (`mirror.py`). A thread brings it up to date as
soon as the database notifies it of a change, and looks once a second in case a notification is lost. What
this server writes is in its copy when the write returns.
"""

import logging
import math
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

import psycopg
from psycopg import IsolationLevel

from personae.api.database import schema
from personae.api.database.base import Connection, TableRow
from personae.api.database.connections import (
    Connections,
    PostgresConnection,
    PostgresRow,
    answering,
    reason,
)
from personae.api.database.mirror import Changes, Mirror
from personae.errors import LoadError, StorageFailed

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_SECONDS = 1.0  # a change that was not notified is seen after so long
TRUST_SECONDS = 300.0
"""How long the copy is used when the database does not answer. A key that is revoked meanwhile, through a
server that still reaches the database, works here for so long."""
_RETRY_SECONDS = 1.0
_LOADS = 5
_ATTEMPTS = 5
_GAP_SECONDS = 1800.0  # who did not look for so long copies everything: changes are kept for an hour
_TRIM_SECONDS = 600.0
_TRIM = "delete from changes where at < now() - interval '1 hour' and seq < (select max(seq) from changes)"
_LOCK = 0x7065_7273_6F6E_6165  # the advisory lock of those who write


class PostgresDatabase:
    """The database at `url`; `mirror` is the file of its copy. With `follow` the copy learns what others
    write. Raises LoadError if the database does not answer, or refuses."""

    shared = True

    def __init__(self, url: str, mirror: Path, *, follow: bool = True) -> None:
        self._connections = Connections(url)
        self._mirror = Mirror(mirror)
        self._contact = time.monotonic()
        self._over = Event()
        self._thread: Thread | None = None
        try:
            with self._connections.borrow() as raw:
                self._make_tables(raw)
                self._load(raw)
        except (psycopg.Error, StorageFailed) as error:
            self.close()
            why = reason(error) if isinstance(error, psycopg.Error) else error.message
            kind = "cannot be reached" if isinstance(error, psycopg.OperationalError) else "cannot be used"
            raise LoadError(f"--database-url: the database {kind}: {why}.") from None
        (row,) = self._mirror.rows("select value from meta where key = 'secret'")
        self.secret: bytes = row[0]
        if follow:
            self._thread = Thread(target=self._follow, name="database", daemon=True)
            self._thread.start()
        else:
            self._contact = math.inf

    def rows(self, query: str, values: Sequence[object] = ()) -> Sequence[TableRow]:
        """What a select finds in the copy. Raises StorageFailed if the copy is too old."""
        silence = time.monotonic() - self._contact
        if silence > TRUST_SECONDS:
            raise StorageFailed(
                f"The server's database has not answered for {silence:.0f} s. Try again later."
            )
        return self._mirror.rows(query, values)

    @contextmanager
    def read(self) -> Iterator[PostgresConnection]:
        """A connection to read any table. Raises StorageFailed."""
        with answering(), self._connections.borrow() as raw:
            yield PostgresConnection(raw)

    @contextmanager
    def write(self) -> Iterator[PostgresConnection]:
        """A transaction, one at a time over all servers. Raises StorageFailed."""
        with answering():
            with self._connections.borrow() as raw, raw.transaction():
                raw.execute(f"select pg_advisory_xact_lock({_LOCK})")
                yield PostgresConnection(raw)
                changes = self._changes(raw)
            self._mirror.apply(changes)

    def urgently(self, change: Callable[[Connection], T]) -> T:
        """Make a change in a transaction. Raises StorageFailed."""
        with self.write() as db:
            return change(db)

    def keep_reserve(self) -> None:
        """A database on another machine has none."""

    def close(self) -> None:
        """Let go of the database."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._connections.close()
        self._mirror.close()

    def _make_tables(self, raw: "psycopg.Connection[PostgresRow]") -> None:
        """Make what is missing.

        A table of an earlier version is changed while other servers may read several of them, and then one of
        both has to begin again.
        """
        for left in reversed(range(_ATTEMPTS)):
            try:
                self._make_tables_once(raw)
                return
            except psycopg.errors.DeadlockDetected:
                if not left:
                    raise

    def _make_tables_once(self, raw: "psycopg.Connection[PostgresRow]") -> None:
        with raw.transaction():
            raw.execute(f"select pg_advisory_xact_lock({_LOCK})")
            raw.execute(schema.postgres(_LOCK).encode())
            PostgresConnection(raw).execute(
                "insert into meta values ('secret', ?) on conflict do nothing", (secrets.token_bytes(32),)
            )

    def _follow(self) -> None:
        """Keep the copy up to date until the database is closed."""
        lost = False
        while not self._over.is_set():
            try:
                with self._connections.open() as raw:
                    raw.execute("listen personae")
                    self._load(raw)
                    if lost:
                        logger.warning("the database answers again")
                        lost = False
                    self._watch(raw)
            except (psycopg.Error, OSError) as error:
                if not lost:
                    why = reason(error) if isinstance(error, psycopg.Error) else str(error)
                    logger.error(
                        "the database does not answer; what was known before serves for %.0f s: %s",
                        TRUST_SECONDS,
                        why,
                    )
                lost = True
                self._over.wait(_RETRY_SECONDS)
            except Exception as error:  # a thread that ends would leave the copy as it is
                logger.error("the copy of the database cannot be kept up to date", exc_info=error)
                self._over.wait(_RETRY_SECONDS)

    def _watch(self, raw: "psycopg.Connection[PostgresRow]") -> None:
        looked, trimmed = time.time(), time.monotonic()
        while not self._over.is_set():
            for _ in raw.notifies(timeout=POLL_SECONDS, stop_after=1):
                pass
            if abs(time.time() - looked) > _GAP_SECONDS:  # this machine slept: some may be forgotten
                self._load(raw)
            self._mirror.apply(self._changes(raw))
            self._contact, looked = time.monotonic(), time.time()
            if time.monotonic() - trimmed > _TRIM_SECONDS:
                raw.execute(_TRIM)
                trimmed = time.monotonic()

    def _load(self, raw: "psycopg.Connection[PostgresRow]") -> None:
        """Copy everything.

        This server may write while rows are read: they are then older than the copy, and are read again. A
        database that stays older has lost its last changes, as a standby can when it takes over.
        """
        raw.isolation_level = IsolationLevel.REPEATABLE_READ
        try:
            for left in reversed(range(_LOADS)):
                with raw.transaction():
                    seq = self._last(raw)
                    tables = {table: list(self._select(raw, table)) for table in schema.MIRRORED}
                if self._mirror.load(seq, tables, older=not left):
                    break
        finally:
            if not raw.closed:
                raw.isolation_level = None
        self._contact = time.monotonic()

    def _last(self, raw: "psycopg.Connection[PostgresRow]") -> int:
        found = raw.execute("select coalesce(max(seq), 0) from changes").fetchone()
        assert found is not None
        return int(found[0])

    def _changes(self, raw: "psycopg.Connection[PostgresRow]") -> Changes:
        """What the copy has not seen yet, up to the end of this transaction."""
        keys: defaultdict[str, set[str]] = defaultdict(set)
        last = self._mirror.seq
        found = raw.execute("select seq, relation, key from changes where seq > %s order by seq", (last,))
        for seq, table, key in found:
            if table in schema.MIRRORED:
                keys[table].add(key)
            last = seq
        rows = {table: list(self._select(raw, table, named)) for table, named in keys.items()}
        return Changes(last, keys, rows)

    def _select(
        self, raw: "psycopg.Connection[PostgresRow]", table: str, keys: set[str] | None = None
    ) -> Iterator[Any]:
        """The rows of a mirrored table, all or those with one of the keys."""
        query = f"select {', '.join(self._mirror.columns[table])} from {table}"  # noqa: S608  our own words
        if keys is None:
            found = raw.execute(query.encode())
        else:
            found = raw.execute(f"{query} where {schema.MIRRORED[table]} = any(%s)".encode(), (list(keys),))
        return (tuple(row) for row in found)
