"""`personae database migrate`: from the SQLite file of one server to a PostgreSQL database for several."""

import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from batch_fixture import Counting, open_batches, request
from patience import soon
from postgres import PostgresServer
from typer.testing import CliRunner
from uploads import open_fixture, upload, whole

from personae.api.cli import app
from personae.api.database import migration
from personae.api.database.migration import MIGRATED, migrate
from personae.api.database.schema import TABLES
from personae.api.object_store import ObjectStore
from personae.api.responses.conversations import ConversationStore
from personae.api.responses.store import KeptResponse, ResponseStore
from personae.api.sessions.store import SessionStore
from personae.api.tenants.data import DATABASE, DataDir, serving
from personae.api.tenants.store import Identity, TenantLimits, TenantStore
from personae.api.tenants.usage import UsageLedger
from personae.errors import LoadError, StorageFailed

pytestmark = pytest.mark.anyio
Rows = dict[str, list[tuple[Any, ...]]]
ORDERED = {
    "conversation_items": "place",
    **dict.fromkeys(("keys", "files", "batches", "responses"), "rowid"),
}
LINES = [request(f"r{n}", f"text {n}") for n in range(12)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """The data directory of a server that has stopped: rows in every table, and a batch half done."""
    path = tmp_path / "alone"
    async with open_batches(path, keys=True) as server:
        done = await server.start(LINES)
        await server.until(done, "completed")
    half = Counting(frozenset({"text 9"}))
    async with open_batches(path, half, keys=True) as server:
        running = await server.start(LINES)
        await soon(
            lambda: server.batches.get("default", running).request_counts.completed > 0, "some are done"
        )
    with open_fixture(path) as server:
        (path / "key").write_text(server.key("ann", weight=2))
        server.tenants.create_tenant("bob", TenantLimits())
        server.tenants.revoke_key(server.key("bob"))
        server.tenants.create_key("ann", "admin", label="ci", expires=2**32)
        async with server.client(server.key("ann")) as client:
            assert (await upload(client, "poet", whole())).status_code == 201
            assert (await upload(client, "bard", whole(1))).status_code == 201
            assert (await upload(client, "poet", whole(2), replace="true")).status_code == 201
            assert (await client.patch("/v1/adapters/poet", json={"pinned": 1})).status_code == 200
            body = {"targets": {"poet@1": 9, "poet@2": 1}}
            assert (await client.put("/v1/adapter_aliases/split", json=body)).status_code == 200
    await fill(path)
    return path


async def fill(path: Path) -> None:
    """Use, sessions, responses and conversations."""
    with closing(DataDir(path)) as data:
        ledger = UsageLedger(data, clock=lambda: 7200.0)
        ledger.add(Identity("ann", "tenant"), "poet", 5, 2, 3, 0.25)
        ledger.add(Identity("ann", "tenant"), None, 1, 0, 1, 0.0)
        ledger.flush()
        sessions = SessionStore(600, data=data)
        for name in ("chat", "a\0b"):
            sessions.end(sessions.begin("ann", name, 600), prompt=5, cached=2, completion=3)
        sessions.flush()
        responses = ResponseStore(data)
        first = KeptResponse("ann", "resp_" + "a" * 16, None, b"[]", b"{}")
        second = KeptResponse("ann", "resp_" + "b" * 16, first.id, b"[1]", b"{}", b"{}")
        for one in (first, second):
            await responses.put(one, None)
        items = [{"id": f"msg_{n}", "type": "message", "content": "\0ä"} for n in range(3)]
        conversations = ConversationStore(data)
        made = conversations.create("ann", None, {"topic": "a\0b\\n\t"}, items[:1])
        conversations.add("ann", None, made.id, items[1:])


def stored(row: Sequence[Any]) -> tuple[Any, ...]:
    """A row as PostgreSQL has it: its texts have no NUL."""
    return tuple(value.replace("\0", "\ufffd") if isinstance(value, str) else value for value in row)


def in_sqlite(path: Path) -> Rows:
    with closing(sqlite3.connect(path)) as db:
        return {
            table: [
                stored(row) for row in db.execute(f"select {columns(db, table)} from {table} order by rowid")
            ]
            for table in TABLES
        }


def columns(db: sqlite3.Connection, table: str) -> str:
    names = [row[1] for row in db.execute(f"pragma table_info({table})")]
    return ", ".join(name for name in names if name != "place")


def in_postgres(url: str, like: Path) -> Rows:
    """The rows of the same tables; of those without an order of their own in SQLite's."""
    import psycopg

    with closing(sqlite3.connect(like)) as lite, psycopg.connect(url) as db:
        found = {}
        for table in TABLES:
            order = f"order by {ORDERED[table]}" if table in ORDERED else ""
            query = f"select {columns(lite, table)} from {table} {order}"
            found[table] = [stored(row) for row in db.execute(query.encode())]
        return found


def counts(url: str) -> dict[str, int]:
    """How many rows PostgreSQL has, by table, without empty tables."""
    import psycopg

    with psycopg.connect(url) as db:
        tables = (*TABLES, "batch_results", "changes", "owners")
        found = {
            table: db.execute(f"select count(*) from {table}".encode()).fetchone()[0] for table in tables
        }  # type: ignore[index]
        return {table: count for table, count in found.items() if count}


@pytest.fixture
def database(folder: Path) -> Iterator[Path]:
    """The SQLite file, whose rows the test must not change."""
    before = in_sqlite(folder / DATABASE)
    yield folder / DATABASE
    assert in_sqlite(folder / DATABASE) == before


def run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["database", "migrate", *words])
    return done.exit_code, done.stdout, done.stderr


async def test_every_row_of_every_table_moves_in_its_order(folder: Path, url: str) -> None:
    before = in_sqlite(folder / DATABASE)
    assert all(before.values()), "every table has rows"
    code, said, errors = run("--data-dir", str(folder), "--database-url", url)
    assert (code, errors) == (0, "")
    assert not (folder / DATABASE).exists()
    after = in_postgres(url, folder / MIGRATED)
    for table, rows in before.items():
        moved = after[table] if table in ORDERED else sorted(after[table])
        assert moved == (rows if table in ORDERED else sorted(rows)), table
        assert f"{table} " in said
        assert str(len(rows)) in said
    assert in_sqlite(folder / MIGRATED) == before, "it is still there"
    with closing(DataDir(folder, url)) as data:
        store = TenantStore(data)
        found = store.identify((folder / "key").read_text())
        assert found is not None
        assert (found.tenant, found.limits.weight) == ("ann", 2)
        assert store.identify(store.create_key("ann", "tenant", label="after")) is not None
    newest = in_postgres(url, folder / MIGRATED)["keys"][-1]
    assert "after" in newest, "new rows come after those that were moved"


async def test_a_server_goes_on_with_what_the_folder_has(folder: Path, url: str, tmp_path: Path) -> None:
    migrate(folder, url)
    engine = Counting()
    async with open_batches(folder, engine, database_url=url) as server:
        (running,) = (
            each.id for each in server.batches.page("default", None, 10)[0] if each.status != "completed"
        )
        batch = await server.until(running, "completed")
        assert batch["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
        lines = await server.lines(batch["output_file_id"])
    assert sorted(line["custom_id"] for line in lines) == sorted(line["custom_id"] for line in LINES)
    assert 0 < sum(engine.asked.values()) < 12, "what was done is not done again"
    with open_fixture(folder, opened=DataDir(folder, url)) as one:
        async with one.client((folder / "key").read_text()) as client:
            body = {"model": "poet", "messages": [{"role": "user", "content": "hi"}]}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


async def test_with_an_object_store_any_server_has_the_contents(
    folder: Path, url: str, tmp_path: Path
) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed: pip install obstore")
    bucket = f"file://{tmp_path}/bucket"
    with closing(DataDir(folder)) as data:
        (lost,) = (row["id"] for row in data.rows("select id from files order by rowid limit 1"))
        names = [row["id"] for row in data.rows("select id from files")]
    shutil.move(folder / "files" / lost, tmp_path / "lost")
    code, said, errors = run("--data-dir", str(folder), "--database-url", url, "--object-store", bucket)
    assert code == 0
    assert errors == f"warning: {folder} has no content of files/{lost}\n"
    assert f"{3 + len(names) - 1} adapters and files are in the object store" in said
    objects = ObjectStore(bucket)
    opened = DataDir(tmp_path / "new", url, objects=objects)
    with open_fixture(tmp_path / "new", opened=opened) as new:
        async with new.client((folder / "key").read_text()) as client:
            for name in ("poet", "poet@2", "bard", "split"):
                body = {"model": name, "messages": [{"role": "user", "content": "hi"}]}
                assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    for name in names:
        assert objects.has(f"files/{name}") == (name != lost)


async def test_a_database_that_is_not_empty_is_refused(database: Path, url: str, tmp_path: Path) -> None:
    with closing(DataDir(tmp_path / "other", url)) as data:
        TenantStore(data).create_tenant("zoe", TenantLimits())
    before = counts(url)
    code, _, said = run("--data-dir", str(database.parent), "--database-url", url)
    assert (code, said) == (2, "error: --database-url: the database is not empty, it has tenants.\n")
    assert counts(url) == before


@pytest.mark.parametrize("table", ["meta", "keys", "conversation_items", "batches"])
async def test_a_failure_in_any_table_leaves_the_database_empty_and_the_next_try_works(
    folder: Path, database: Path, url: str, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    move = migration._move_table

    def fails(source: Any, target: Any, name: str) -> int:
        count = move(source, target, name)
        if name == table:
            raise StorageFailed("planted")
        return count

    with monkeypatch.context() as planted:
        planted.setattr(migration, "_move_table", fails)
        with pytest.raises(StorageFailed, match="planted"):
            migrate(folder, url)
    assert counts(url) == {"meta": 1, "changes": 1}, "its own secret"
    with serving(folder) as data:
        assert TenantStore(data).identify((folder / "key").read_text()) is not None
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    assert migrate(copy, url).rows["tenants"] == len(in_sqlite(database)["tenants"])


async def test_a_row_that_postgresql_refuses_moves_nothing_and_names_its_table(
    folder: Path, url: str
) -> None:
    with closing(sqlite3.connect(folder / DATABASE)) as db, db:
        db.execute(
            "insert into keys (id, tenant, role, digest, created) values ('x', 'nobody', 'admin', x'00', 1)"
        )
    code, _, said = run("--data-dir", str(folder), "--database-url", url)
    assert code == 1
    assert said.startswith("error: The database refuses a row of keys: ")
    assert counts(url).keys() == {"meta", "changes"}
    assert (folder / DATABASE).exists()


async def test_a_database_that_dies_in_between_has_nothing_of_it(
    folder: Path, database: Path, url: str, server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = migration._move_table
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)

    def stops(source: Any, target: Any, name: str) -> int:
        if name == "files":
            server.stop()
        return move(source, target, name)

    with monkeypatch.context() as planted:
        planted.setattr(migration, "_move_table", stops)
        try:
            with pytest.raises(StorageFailed, match="The server's database failed"):
                migrate(folder, url)
        finally:
            server.start()
    assert counts(url).keys() == {"meta", "changes"}
    assert migrate(copy, url).rows["adapters"] == 2


async def test_a_folder_or_a_database_that_a_server_uses_is_refused(
    database: Path, url: str, tmp_path: Path
) -> None:
    with serving(database.parent), pytest.raises(LoadError, match="another server is using it"):
        migrate(database.parent, url)
    with closing(DataDir(tmp_path / "other", url)) as data:
        assert data.leases is not None
        with data.leases.running(), pytest.raises(LoadError, match="a server uses the database"):
            migrate(database.parent, url)
    assert counts(url).keys() == {"meta", "changes"}


async def test_a_second_try_says_that_it_is_done(folder: Path, url: str) -> None:
    migrate(folder, url)
    code, _, said = run("--data-dir", str(folder), "--database-url", url)
    assert (code, said) == (
        2,
        f"error: --data-dir {folder}: there is no personae.db, so there is nothing to move.\n",
    )
    (folder / MIGRATED).rename(folder / DATABASE)  # as after a crash just before it was renamed
    before = counts(url)
    code, _, said = run("--data-dir", str(folder), "--database-url", url)
    assert code == 2
    assert "the database has the records of this folder already" in said
    assert counts(url) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--database-url", "mysql://root:sesame@host/x"), "this is no PostgreSQL URL"),
        (
            ("--database-url", "postgresql://a:sesame@127.0.0.1:1/x"),
            "--database-url: the database cannot be reached",
        ),
        (("--database-url", "postgresql://h/x", "--object-store", "ftp://x"), "is no object store"),
    ],
)
async def test_a_wrong_place_is_one_sentence_without_the_password(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    DataDir(tmp_path / "d").close()
    code, _, errors = run("--data-dir", str(tmp_path / "d"), *words)
    assert code == 2
    assert said in errors
    assert "sesame" not in errors
    assert errors.count("\n") == 1
