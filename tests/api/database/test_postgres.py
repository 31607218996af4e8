"""Several servers with one PostgreSQL database."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from patience import eventually
from postgres import PostgresServer
from typer.testing import CliRunner

from personae.api.cli import app
from personae.api.database.schema import LATER_COLUMNS
from personae.api.responses.conversations import ConversationStore
from personae.api.tenants.data import DataDir, serving
from personae.api.tenants.store import Identity, TenantLimits, TenantStore
from personae.api.tenants.usage import UsageLedger
from personae.errors import Conflict, LoadError, NotFound, StorageFailed

Open = Callable[[str], DataDir]
ANN = Identity("ann", "tenant")


def until(condition: Callable[[], bool]) -> None:
    eventually(condition, "every server knows it")


@pytest.fixture
def pair(opened: Open) -> tuple[TenantStore, TenantStore]:
    """The tenants, as two servers see them."""
    return TenantStore(opened("one")), TenantStore(opened("two"))


def test_a_key_works_at_every_server_and_its_revocation_reaches_all(
    pair: tuple[TenantStore, TenantStore],
) -> None:
    one, two = pair
    one.create_tenant("ann", TenantLimits(concurrent=3))
    key = one.create_key("ann", "tenant")
    assert one.identify(key) is not None
    until(lambda: two.identify(key) is not None)
    found = two.identify(key)
    assert found is not None
    assert (found.tenant, found.limits.concurrent) == ("ann", 3)
    two.revoke_key(key)
    assert two.identify(key) is None
    until(lambda: one.identify(key) is None)


def test_a_change_is_seen_even_if_its_notification_is_lost(
    pair: tuple[TenantStore, TenantStore], url: str
) -> None:
    one, two = pair
    one.create_tenant("ann", TenantLimits())
    key = one.create_key("ann", "tenant")
    until(lambda: two.identify(key) is not None)
    import psycopg

    with psycopg.connect(url) as db:
        (source,) = db.execute("select prosrc from pg_proc where proname = 'personae_note_change'").fetchone()
        silent = source.replace("perform pg_notify('personae', '');", "")
        assert silent != source
        db.execute(
            "create or replace function personae_note_change() returns trigger language plpgsql "
            f"as $${silent}$$"
        )
    one.revoke_key(key)
    until(lambda: two.identify(key) is None)


def test_servers_that_start_at_once_share_one_secret(opened: Open) -> None:
    with ThreadPoolExecutor(4) as threads:
        assert len({data.secret for data in threads.map(opened, "abcd")}) == 1


def of_an_earlier_version(opened: Open, url: str) -> None:
    """Leaves a database that lacks the columns that came later."""
    import psycopg

    opened("one").close()
    with psycopg.connect(url, autocommit=True) as db:
        for table, column, _ in LATER_COLUMNS:
            db.execute(f"alter table {table} drop column {column}")


def has_later_columns(data: DataDir) -> bool:
    with data.read() as again:
        for table, column, _ in LATER_COLUMNS:
            again.execute(f"select {column} from {table} limit 1").fetchall()
    return True


def test_a_database_of_an_earlier_version_gets_the_columns_that_it_lacks(opened: Open, url: str) -> None:
    of_an_earlier_version(opened, url)
    assert has_later_columns(opened("two"))


def test_it_gets_them_while_another_server_reads_its_tables_in_another_order(opened: Open, url: str) -> None:
    import psycopg

    of_an_earlier_version(opened, url)
    first, last = LATER_COLUMNS[0][0], LATER_COLUMNS[-1][0]
    with (
        psycopg.connect(url) as reader,
        psycopg.connect(url, autocommit=True) as watcher,
        ThreadPoolExecutor(1) as threads,
    ):
        reader.execute("set deadlock_timeout = '30s'")  # so that it is not the reader that begins again
        reader.execute(f"select from {last}")
        waiting = threads.submit(opened, "two")
        blocked = f"select from pg_locks where not granted and relation = '{last}'::regclass"
        until(lambda: watcher.execute(blocked).fetchone() is not None)
        reader.execute(f"select from {first}")  # waits for the other, which waits for the reader
        reader.commit()
        assert has_later_columns(waiting.result())


def test_changes_at_the_same_time_are_not_lost(pair: tuple[TenantStore, TenantStore]) -> None:
    pair[0].create_tenant("ann", TenantLimits())
    fields = ("concurrent", "adapters", "files", "batches", "file_bytes", "requests_per_minute")

    def change(turn: int) -> None:
        pair[turn % 2].set_limits("ann", {fields[turn % len(fields)]: turn})

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(change, range(len(fields))))
    until(lambda: pair[1].find_tenant("ann") == pair[0].find_tenant("ann"))
    limits = pair[0].find_tenant("ann").limits
    assert [getattr(limits, name) for name in fields] == list(range(len(fields)))


def test_one_tenant_of_many_that_is_there_already_stops_them_all(
    pair: tuple[TenantStore, TenantStore],
) -> None:
    pair[0].create_tenant("ann", TenantLimits())
    with pytest.raises(Conflict, match="'ann'"):
        pair[1].create_many([("bob", TenantLimits()), ("ann", TenantLimits())], keys=True)
    assert [each.name for each in pair[0].list_tenants()] == ["ann"]
    until(lambda: [each.name for each in pair[1].list_tenants()] == ["ann"])
    assert pair[1].list_keys() == []


def test_a_freed_tenant_is_gone_everywhere(pair: tuple[TenantStore, TenantStore]) -> None:
    pair[0].create_tenant("ann", TenantLimits())
    pair[0].create_key("ann", "tenant")
    pair[0].revoke_tenant("ann")
    pair[0].free_tenant("ann")
    until(lambda: pair[1].list_tenants() == [])
    assert pair[1].list_keys() == []


def test_usage_of_all_servers_adds_up(opened: Open) -> None:
    ledgers = [UsageLedger(opened(name), clock=lambda: 7200.0) for name in ("one", "two")]
    for ledger in ledgers * 2:
        ledger.add(ANN, "poet", 5, 2, 3, 0.25)
        ledger.flush()
    rows, more = ledgers[0].rows(["hour", "tenant", "adapter"])
    assert not more
    (row,) = rows
    assert (row.hour, row.tenant, row.adapter) == (7200, "ann", "poet")
    counted = (row.requests, row.prompt_tokens, row.cached_tokens, row.completion_tokens, row.adapter_seconds)
    assert counted == (4, 20, 8, 12, 1.0)
    assert all(type(each) is int for each in counted[:4])
    assert ledgers[1].rows([])[0][0].requests == 4
    assert ledgers[1].rows([], tenant="bob") == ([], False)


def test_a_conversation_is_found_through_every_server(opened: Open) -> None:
    one, two = (ConversationStore(opened(name)) for name in ("one", "two"))
    items = [{"id": f"msg_{n}", "type": "message", "role": "user", "content": "hi\0"} for n in range(3)]
    made = one.create("ann", None, {"topic": "a\0b"}, items[:1])
    two.add("ann", None, made.id, items[1:])
    assert one.page("ann", made.id, None, 10, "asc") == (items, False)
    assert two.page("ann", made.id, "msg_2", 1, "desc") == ([items[1]], True)
    with pytest.raises(Conflict):
        one.add("ann", None, made.id, items[:1])
    with pytest.raises(NotFound):
        two.find("bob", made.id)
    with pytest.raises(NotFound):
        two.find("ann", "conv\0")
    one.remove("ann", made.id)
    with pytest.raises(NotFound):
        two.items("ann", made.id)


def test_a_database_that_is_down_at_the_start_is_one_sentence_without_the_password(
    tmp_path: Path, server: PostgresServer
) -> None:
    url = server.url("nowhere").replace("personae@", "personae:sesame@")
    for each in ("postgresql://personae:sesame@127.0.0.1:1/x", url):
        done = CliRunner().invoke(app, ["tenants", "list", "--database-url", each])
        assert done.exit_code == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: --database-url: the database cannot be reached: ")
        assert "sesame" not in line
        with pytest.raises(LoadError, match="cannot be reached"), serving(tmp_path / "data", each):
            pass


def test_a_url_of_something_else_is_refused_without_showing_it(tmp_path: Path) -> None:
    for command in (["tenants", "list", "--database-url"], ["serve", "--database-url"]):
        done = CliRunner().invoke(app, [*command, "mysql://root:sesame@host/x"])
        assert done.exit_code == 2
        assert "this is no PostgreSQL URL" in done.stderr
        assert "sesame" not in done.stderr


def test_commands_work_on_the_database(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSONAE_DATABASE_URL", url)

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        return done.stdout

    assert run("tenants", "create", "ann", "--concurrent", "2") == "tenant ann created\n"
    key = run("keys", "create", "ann", "--label", "ci").strip()
    assert key.startswith("psn_")
    assert "concurrent=2" in run("tenants", "list")
    run("keys", "revoke", key)
    assert '"revoked": null' not in run("keys", "list", "--json")
    assert run("usage", "--json").strip() == "[]"


def test_a_folder_stays_with_the_database_that_it_began_with(tmp_path: Path, url: str) -> None:
    DataDir(tmp_path / "alone").close()
    with pytest.raises(LoadError, match=r"has a database of its own, personae\.db"):
        DataDir(tmp_path / "alone", url)
    DataDir(tmp_path / "shared", url).close()
    with pytest.raises(LoadError, match="was used with --database-url"):
        DataDir(tmp_path / "shared")


def test_two_servers_cannot_share_a_folder_and_the_first_is_not_disturbed(tmp_path: Path, url: str) -> None:
    with serving(tmp_path / "data", url) as first:
        store = TenantStore(first)
        store.create_tenant("ann", TenantLimits())
        with pytest.raises(LoadError, match="another server is using it"), serving(tmp_path / "data", url):
            pass
        assert store.find_tenant("ann").name == "ann"


def test_a_server_goes_on_without_its_database_and_loses_nothing(
    opened: Open, server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    data, other = opened("one"), opened("two")
    store, ledger = TenantStore(data), UsageLedger(data)
    store.create_tenant("ann", TenantLimits())
    keys = [store.create_key("ann", "tenant") for _ in range(2)]
    server.stop()
    try:
        until(lambda: "the database does not answer" in caplog.text)
        assert store.identify(keys[0]) is not None
        ledger.add(ANN, None, 1, 0, 1)
        began = time.monotonic()
        for write in (
            ledger.flush,
            lambda: store.revoke_key(keys[0]),
            lambda: store.create_key("ann", "tenant"),
            lambda: ConversationStore(data).find("ann", "conv_1"),
        ):
            with pytest.raises(StorageFailed, match="The server's database failed"):
                write()
        assert time.monotonic() - began < 10
        assert store.identify(keys[0]) is not None  # what was not revoked works
    finally:
        server.start()
    TenantStore(other).revoke_key(keys[0])
    ledger.flush()
    assert ledger.rows([])[0][0].requests == 1
    until(lambda: store.identify(keys[0]) is None)
    assert store.identify(keys[1]) is not None
    until(lambda: "the database answers again" in caplog.text)
    assert len([each for each in caplog.records if each.levelno == logging.ERROR]) == 2  # one for each server


def test_reading_never_waits_for_a_database_that_is_silent(opened: Open, server: PostgresServer) -> None:
    store = TenantStore(opened("one"))
    store.create_tenant("ann", TenantLimits())
    key = store.create_key("ann", "tenant")
    server.pause(on=True)
    try:
        slowest = 0.0
        for _ in range(50):
            began = time.monotonic()
            assert store.identify(key) is not None
            slowest = max(slowest, time.monotonic() - began)
            time.sleep(0.02)
    finally:
        server.pause(on=False)
    assert slowest < 0.5


def test_a_server_that_was_cut_off_for_too_long_trusts_no_key(
    opened: Open, server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TenantStore(opened("one"))
    store.create_tenant("ann", TenantLimits())
    key = store.create_key("ann", "tenant")
    monkeypatch.setattr("personae.api.database.postgres.TRUST_SECONDS", 2.5)
    server.stop()
    try:

        def refused() -> bool:
            try:
                return store.identify(key) is None
            except StorageFailed as error:
                return "has not answered for" in error.message

        until(refused)
    finally:
        server.start()
    until(lambda: not refused())
    assert store.identify(key) is not None
