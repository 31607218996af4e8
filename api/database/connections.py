"""Connections to PostgreSQL, some of which are kept open for the next use."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import BoundedSemaphore, Lock
from typing import Any

import psycopg
from psycopg import sql
from psycopg.abc import Buffer
from psycopg.adapt import Loader
from psycopg.pq import TransactionStatus

from personae.api.database.base import Result
from personae.errors import StorageFailed

CONNECT_SECONDS = 5
_MOST = 8  # connections at the same time
_WAIT_SECONDS = 10.0
_SILENCE_MS = 10_000  # without an answer from the network until a connection counts as broken
_SESSION = (
    "set lock_timeout = '5s'; set statement_timeout = '30s'; "
    "set idle_in_transaction_session_timeout = '30s'; set timezone = 'UTC'"
)


class PostgresRow:
    """A row: values by the name of their column or by their place."""

    __slots__ = ("_names", "_values")

    def __init__(self, names: dict[str, int], values: tuple[Any, ...]) -> None:
        self._names = names
        self._values = values

    def __getitem__(self, key: str | int) -> Any:
        return self._values[self._names[key] if isinstance(key, str) else key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _row_factory(cursor: "psycopg.Cursor[Any]") -> Any:
    names = {column.name: place for place, column in enumerate(cursor.description or ())}
    return lambda values: PostgresRow(names, tuple(values))


class _NumberLoader(Loader):
    """Sums of whole numbers are whole numbers, as in SQLite."""

    def load(self, data: Buffer) -> int | float:
        text = bytes(data)
        return int(text) if text.isdigit() else float(text)


class PostgresConnection:
    """A `Connection` whose queries have `?` for values."""

    def __init__(self, raw: "psycopg.Connection[PostgresRow]") -> None:
        self.raw = raw

    def execute(self, query: str, values: Sequence[Any] = (), /) -> Result:
        """Run a query. Its values are put into its text, so their types need not be known."""
        cursor = psycopg.ClientCursor(self.raw)
        return cursor.execute(_translated(query), _storable(values))

    def executemany(self, query: str, values: Iterable[Sequence[Any]], /) -> object:
        """Run a query once for each of the values."""
        with self.raw.cursor() as cursor:
            cursor.executemany(_translated(query), map(_storable, values))
        return None

    def copy(self, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> int:
        """Add many rows to a table. Returns their number. Raises StorageFailed for values that do not fit."""
        count = 0
        query = sql.SQL("copy {} ({}) from stdin").format(
            sql.Identifier(table), sql.SQL(", ").join(map(sql.Identifier, columns))
        )
        try:
            with self.raw.cursor() as cursor, cursor.copy(query) as copying:
                for row in rows:
                    copying.write_row(_storable(row))
                    count += 1
        except (psycopg.DataError, psycopg.IntegrityError) as error:
            raise StorageFailed(f"The database refuses a row of {table}: {reason(error)}.") from error
        return count


def _translated(query: str) -> sql.SQL:
    return sql.SQL(query.replace("%", "%%").replace("?", "%s"))


def _storable(values: Sequence[Any]) -> list[Any]:
    """The values without the one character that PostgreSQL's texts can't have."""
    return [value.replace("\0", "\ufffd") if isinstance(value, str) else value for value in values]


@contextmanager
def answering() -> Iterator[None]:
    """Turns a database that does not answer within the block into StorageFailed."""
    try:
        yield
    except (psycopg.OperationalError, psycopg.InterfaceError, psycopg.InternalError) as error:
        raise StorageFailed(f"The server's database failed: {reason(error)}. Try again later.") from error


def reason(error: psycopg.Error) -> str:
    """What the driver says, on one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip().rstrip(".")


class Connections:
    """At most 8 connections to the database at `url`. Any thread may call it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._idle: list[psycopg.Connection[PostgresRow]] = []
        self._lock = Lock()
        self._places = BoundedSemaphore(_MOST)

    def open(self) -> "psycopg.Connection[PostgresRow]":
        """A new connection, in which every query is a transaction. Raises psycopg.Error."""
        raw: psycopg.Connection[PostgresRow] = psycopg.Connection.connect(
            self._url,
            autocommit=True,
            row_factory=_row_factory,
            application_name="personae",
            connect_timeout=CONNECT_SECONDS,
            tcp_user_timeout=_SILENCE_MS,
            keepalives_idle=5,
            keepalives_interval=2,
            keepalives_count=3,
        )
        try:
            raw.prepare_threshold = None  # poolers between the server and the database may not know them
            raw.adapters.register_loader("numeric", _NumberLoader)
            raw.execute(_SESSION)
        except BaseException:
            raw.close()
            raise
        return raw

    @contextmanager
    def borrow(self) -> Iterator["psycopg.Connection[PostgresRow]"]:
        """A connection that answered just now. Raises psycopg.Error, or StorageFailed if none gets free."""
        if not self._places.acquire(timeout=_WAIT_SECONDS):
            raise StorageFailed("The server's database is slow. Try again later.")
        try:
            raw = self._answering() or self.open()
            try:
                yield raw
            finally:
                self._give_back(raw)
        finally:
            self._places.release()

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for raw in idle:
            raw.close()

    def _answering(self) -> "psycopg.Connection[PostgresRow] | None":
        """An idle connection. If one is broken, the others are older than the trouble too, and are closed."""
        with self._lock:
            raw = self._idle.pop() if self._idle else None
        if raw is None:
            return None
        try:
            raw.execute("")
        except psycopg.Error:
            raw.close()
            self.close()
            return None
        return raw

    def _give_back(self, raw: "psycopg.Connection[PostgresRow]") -> None:
        if raw.closed or raw.info.transaction_status != TransactionStatus.IDLE:
            with suppress(psycopg.Error):
                raw.close()
            return
        with self._lock:
            self._idle.append(raw)
