"""Moves the records of a data directory from its SQLite file to a PostgreSQL database.

All tables move in one transaction, or none does. Afterwards the SQLite file has another name, so that no
server uses it by mistake.
"""

import os
import secrets
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from personae.api.adapters.files import object_name as adapter_object
from personae.api.batches.journal import results_in
from personae.api.batches.model import MOVES
from personae.api.database.base import Connection
from personae.api.database.schema import TABLES
from personae.api.files.store import CONTENT
from personae.api.files.store import object_name as file_object
from personae.api.object_store import ObjectStore
from personae.api.tenants.data import DATABASE, MIRROR, RESERVE, DataDir, locked, open_postgres
from personae.errors import LoadError
from personae.lora.peft_names import CONFIG_FILE, TENSORS_FILE

if TYPE_CHECKING:
    from personae.api.database.connections import PostgresConnection

MIGRATED = f"{DATABASE}.migrated"


@dataclass(frozen=True)
class Migrated:
    """What was moved: rows by table, and how many adapters and files were put into the object store.
    `missing` names contents that the directory does not have."""

    rows: dict[str, int]
    contents: int
    missing: tuple[str, ...]


def migrate(folder: Path, url: str, objects: ObjectStore | None = None) -> Migrated:
    """Move everything. With `objects` the contents of adapters and files are put there; otherwise they stay
    in the folder only. Raises LoadError or StorageFailed: the folder is then as it was, the database empty.
    """
    if not (folder / DATABASE).exists():
        raise LoadError(f"--data-dir {folder}: there is no {DATABASE}, so there is nothing to move.")
    with locked(folder), TemporaryDirectory(prefix="personae-") as temporary:
        with (
            closing(open_postgres(url, Path(temporary) / MIRROR, follow=False)) as target,
            closing(DataDir(folder)) as data,
            data.write() as source,
        ):
            # Nobody else writes to the source meanwhile, and all its tables are of one moment.
            with target.read() as db:
                _check_empty(db, data.secret)
            contents, missing = _put_contents(source, data, objects)
            with target.write() as db:
                db.execute("set local statement_timeout = 0")
                db.execute("set local idle_in_transaction_session_timeout = 0")
                _check_empty(db, data.secret)
                db.execute("delete from meta")
                rows = {table: _move_table(source, db, table) for table in TABLES}
                rows["batch_results"] = _move_results(source, db, data.batches)
        try:
            os.replace(folder / DATABASE, folder / MIGRATED)
            (folder / RESERVE).unlink(missing_ok=True)
        except OSError as error:
            raise LoadError(
                f"The records are in the database now. Move {folder / DATABASE} away by hand: {error}."
            ) from None
    return Migrated(rows, contents, missing)


def _check_empty(db: Connection, secret: bytes) -> None:
    """Raises LoadError if the database has records, or a server uses it."""
    found = db.execute("select value from meta where key = 'secret'").fetchone()
    if found is not None and secrets.compare_digest(bytes(found[0]), secret):
        raise LoadError(
            "--database-url: the database has the records of this folder already. Give a server both options "
            f"after you have moved {DATABASE} out of the folder."
        )
    full = [
        table
        for table in TABLES
        if table != "meta" and db.execute(f"select 1 from {table} limit 1").fetchone() is not None  # noqa: S608  our own words
    ]
    if full:
        raise LoadError(f"--database-url: the database is not empty, it has {', '.join(full)}.")
    if db.execute("select 1 from servers where until > clock_timestamp()").fetchone() is not None:
        raise LoadError("--database-url: a server uses the database. Stop it first.")


def _move_table(source: Connection, target: "PostgresConnection", table: str) -> int:
    """Copy a table in the order of its rows. Returns their number."""
    known = [row["name"] for row in source.execute(f"pragma table_info({table})")]
    columns = [name for name in known if name != "place"]  # a number, which the database gives
    query = f"select {', '.join(columns)} from {table} order by rowid"  # noqa: S608  our own words
    return target.copy(table, columns, (tuple(row) for row in source.execute(query)))


def _move_results(source: Connection, target: "PostgresConnection", batches: Path) -> int:
    """Copy the results that unfinished batches have so far. Returns their number."""
    marks = ", ".join("?" * len(MOVES))
    query = f"select id from batches where status in ({marks}) order by rowid"  # noqa: S608  question marks
    found = [row["id"] for row in source.execute(query, tuple(MOVES))]
    journals = {id: batches / id for id in found if (batches / id).is_dir()}
    lines = ((id, *result) for id, folder in journals.items() for result in results_in(folder))
    return target.copy("batch_results", ("batch", "custom_id", "file", "line"), lines)


def _put_contents(
    source: Connection, data: DataDir, objects: ObjectStore | None
) -> tuple[int, tuple[str, ...]]:
    """Put what adapters and files consist of into the object store, if it is not there. Returns how many are
    there then, and which the folder lacks."""
    wanted: dict[str, Mapping[str, Path]] = {}
    for row in source.execute("select digest from adapters union select digest from adapter_versions"):
        folder = data.adapters / row["digest"]
        wanted[adapter_object(row["digest"])] = {name: folder / name for name in (CONFIG_FILE, TENSORS_FILE)}
    for row in source.execute("select id from files"):
        wanted[file_object(row["id"])] = {CONTENT: data.files / row["id"]}
    here = {name: files for name, files in wanted.items() if all(path.is_file() for path in files.values())}
    if objects is not None:
        for name, files in here.items():
            if not objects.has(name):
                objects.put(name, files)
    return (0 if objects is None else len(here)), tuple(sorted(wanted.keys() - here.keys()))
