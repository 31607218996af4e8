"""Which of several servers with one database does a piece of work, such as running a batch.

A server renews its lease on everything that it does every few seconds. When it stops or dies, others take its
work over. Times are the database's, so servers' clocks do not matter.
"""

import logging
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from personae.api.database.base import Connection, Database
from personae.api.tenants.flusher import WriteFailures, flushed
from personae.errors import StorageFailed

logger = logging.getLogger(__name__)

LEASE_SECONDS = 20
RENEW_SECONDS = 5.0
LOOK_SECONDS = 2.0  # how often a server looks for work of others that ended

_RENEW = (
    "insert into servers (id, until) values (?, clock_timestamp() + ? * interval '1 second') "
    "on conflict (id) do update set until = excluded.until"
)
_LIVE = "select id from servers where until > clock_timestamp()"
_TAKE = (
    "insert into owners (item, server) values (?, ?) "
    "on conflict (item) do update set server = excluded.server"
)
_OURS = (
    "select owners.item from owners join servers on servers.id = owners.server "
    "where owners.server = ? and servers.until > clock_timestamp()"
)


class Leases:
    """The work of one server. Its first lease is taken by `renew`. For threads."""

    def __init__(self, database: Database, failures: WriteFailures) -> None:
        self._database = database
        self._failures = failures
        self._server = secrets.token_hex(8)

    def renew(self) -> None:
        """Renew the lease on everything that this server does. Raises StorageFailed."""
        with self._database.read() as db:
            db.execute(_RENEW, (self._server, LEASE_SECONDS))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Renew while the block runs; let others take over when it ends. Raises StorageFailed."""
        self.renew()
        try:
            with flushed("the lease on batches", lambda: self.renew(), RENEW_SECONDS, logger, self._failures):
                yield
        finally:
            with suppress(StorageFailed), self._database.write() as db:
                db.execute("delete from servers where id = ?", (self._server,))

    def begin(self, db: Connection, item: str) -> None:
        """Begin new work, in the transaction that records it."""
        db.execute(_TAKE, (item, self._server))

    def check(self, db: Connection, item: str) -> None:
        """Raises StorageFailed if the work is not this server's any more. Then the transaction has to end."""
        found = db.execute(f"{_OURS} and owners.item = ?", (self._server, item)).fetchone()
        if found is None:
            raise StorageFailed("Another server has taken this work over.")

    def end(self, db: Connection, item: str) -> None:
        """End work, in the transaction that records its end."""
        db.execute("delete from owners where item = ?", (item,))

    def lost(self, items: Collection[str]) -> set[str]:
        """Those of this server's work that are not its own any more. Raises StorageFailed."""
        if not items:
            return set()
        with self._database.read() as db:
            ours = {row["item"] for row in db.execute(_OURS, (self._server,))}
        return set(items) - ours

    def take(self, items: Collection[str]) -> set[str]:
        """Take over work that no living server does; returns what was taken. Raises StorageFailed."""
        if not items:
            return set()
        with self._database.write() as db:
            live = {row["id"] for row in db.execute(_LIVE)}
            if self._server not in live:
                return set()
            marks = ", ".join("?" * len(items))
            query = f"select item, server from owners where item in ({marks})"  # noqa: S608  question marks
            theirs = {row["item"] for row in db.execute(query, tuple(items)) if row["server"] in live}
            taken = set(items) - theirs
            for item in taken:
                self.begin(db, item)
            return taken
