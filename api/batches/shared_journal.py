"""A batch's journal in a database that several servers share, so that another server can go on with it.

A result counts once it is in the database, where a request has at most one. The files in the folder are a
copy of it.
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from personae.api.batches.journal import ERRORS, OUTPUT, Journal, file_of
from personae.api.batches.model import OutputLine
from personae.api.database.base import Connection
from personae.api.tenants.data import DataDir

_AT_ONCE = 1000  # lines that are read at a time
_ADD = "insert into batch_results (batch, custom_id, file, line) values (?, ?, ?, ?) on conflict do nothing"
_MORE = (
    "select place, line from batch_results where batch = ? and file = ? and place > ? order by place limit ?"
)


class SharedJournal(Journal):
    """The journal of the batch `id`, which this server has to own. Raises StorageFailed, as `write` does."""

    def __init__(self, folder: Path, data: DataDir, id: str) -> None:
        self._data = data
        self._id = id
        folder.mkdir(exist_ok=True)
        for name in (OUTPUT, ERRORS):
            self._copy(folder / name, name)
        super().__init__(folder)

    def write(self, lines: Iterable[OutputLine]) -> None:
        """Store the lines, without those whose custom id is done already.

        Raises StorageFailed if the database fails or another server runs the batch, OSError. What is then
        not stored can be written again.
        """
        new = [line for line in lines if line.custom_id not in self.done]
        if new:
            leases = self._data.leases
            assert leases is not None
            rows = [(self._id, each.custom_id, file_of(each), msgspec.json.encode(each)) for each in new]
            with self._data.write() as db:
                leases.check(db, self._id)
                db.executemany(_ADD, rows)
        super().write(new)

    def _copy(self, path: Path, name: str) -> None:
        """Write a file as it is in the database."""
        place = 0
        with path.open("wb") as file, self._data.read() as db:
            while rows := db.execute(_MORE, (self._id, name, place, _AT_ONCE)).fetchall():
                for row in rows:
                    file.write(row["line"] + b"\n")
                place = rows[-1]["place"]


def forget(db: Connection, id: str) -> None:
    """Forget a batch's results, which are in files now."""
    db.execute("delete from batch_results where batch = ?", (id,))
