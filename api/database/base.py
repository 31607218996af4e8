"""What the stores need of a database.

Queries are written in what SQLite and PostgreSQL have in common, with `?` for values. Differences that remain
are in `schema.py` and `postgres.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class TableRow(Protocol):
    """A row: values by the name of their column or by their place."""

    def __getitem__(self, key: Any, /) -> Any:
        """The value of a column."""

    def __iter__(self) -> Iterator[Any]:
        """The values, in the order of the columns."""


class Result(Protocol):
    """What a query found or changed."""

    @property
    def rowcount(self) -> int:
        """How many rows the query changed."""

    def fetchone(self) -> Any:
        """The next row; None if there is none."""

    def fetchall(self) -> list[Any]:
        """All rows."""

    def __iter__(self) -> Iterator[Any]:
        """All rows, one at a time."""


class Connection(Protocol):
    """A connection, for queries in one transaction."""

    def execute(self, query: str, values: Sequence[Any] = ..., /) -> Result:
        """Run a query."""

    def executemany(self, query: str, values: Iterable[Sequence[Any]], /) -> object:
        """Run a query once for each of the values."""


class Database(Protocol):
    """An open database. `secret` is 32 bytes that never leave it; what is derived from it stays the same.

    `shared`: other servers may use it at the same time.
    """

    shared: bool
    secret: bytes

    def rows(self, query: str, values: Sequence[object] = ()) -> Sequence[TableRow]:
        """What a select finds, at once: for the event loop. It sees what this server wrote, and what others
        wrote a moment ago. Of usage, responses and conversations it sees nothing. Raises StorageFailed."""

    def read(self) -> AbstractContextManager[Connection]:
        """A connection to read any table. For threads. Raises StorageFailed."""

    def write(self) -> AbstractContextManager[Connection]:
        """A transaction: stored when the block ends, rolled back when it raises. No other transaction runs
        meanwhile. For threads. Raises StorageFailed."""

    def urgently(self, change: Callable[[Connection], T]) -> T:
        """Make a change that frees space or revokes access. `change` may be called twice. Raises
        StorageFailed."""

    def keep_reserve(self) -> None:
        """Restore what `urgently` used."""

    def close(self) -> None:
        """Let go of the database."""
