"""The file of a server without PostgreSQL."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from personae.api.database import sqlite as module
from personae.api.database.schema import SQLITE, TABLES
from personae.api.database.sqlite import SqliteDatabase


def tables(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as db:
        return {name for (name,) in db.execute("select name from sqlite_master where type = 'table'")}


def test_all_tables_are_made_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "database"
    with monkeypatch.context() as patch:
        patch.setattr(module, "SQLITE", f"{SQLITE} create table unfinished")
        with pytest.raises(sqlite3.OperationalError, match="incomplete"):
            SqliteDatabase(path, tmp_path / "reserve")
    assert tables(path) == set()
    SqliteDatabase(path, tmp_path / "reserve").close()
    assert tables(path) == set(TABLES)
