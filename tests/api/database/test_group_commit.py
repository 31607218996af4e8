"""Changes of many requests in one transaction, on SQLite and PostgreSQL."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import anyio
import pytest

from personae.api.database.base import Connection
from personae.api.database.group_commit import Change, GroupCommit
from personae.api.tenants.data import DATABASE, DataDir
from personae.errors import StorageFailed

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["sqlite", "postgresql"])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DataDir]:
    url = None if request.param == "sqlite" else request.getfixturevalue("server").database()
    with closing(DataDir(tmp_path / "data", url)) as data:
        yield data


def conversation(id: str) -> Change:
    return lambda db: db.execute("insert into conversations values (?, 'ann', 1, '{}', 1)", (id,))


def item_of_no_conversation(db: Connection) -> None:
    db.execute(
        "insert into conversation_items (conversation, id, bytes, item) values ('none', 'msg_1', 1, ?)",
        (b"{}",),
    )


def found(data: DataDir) -> set[str]:
    with data.read() as db:
        return {row["id"] for row in db.execute("select id from conversations")}


class Held:
    """Counts a data directory's transactions, and holds the first one back until `go`."""

    def __init__(self, data: DataDir, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.go = Event()
        write = data.write

        @contextmanager
        def counted() -> Iterator[Connection]:
            self.count += 1
            if self.count == 1:
                assert self.go.wait(60)
            with write() as db:
                yield db

        monkeypatch.setattr(data, "write", counted)


async def all_at_once(commits: GroupCommit, changes: list[Change], held: Held) -> list[Exception | None]:
    """What each of the changes raises. The first one is being written when the others arrive."""
    results: list[Exception | None] = [None] * len(changes)

    async def write(place: int) -> None:
        try:
            await commits.write(changes[place])
        except Exception as error:
            results[place] = error

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write, 0)
        await anyio.wait_all_tasks_blocked()
        for place in range(1, len(changes)):
            tasks.start_soon(write, place)
        await anyio.wait_all_tasks_blocked()
        held.go.set()
    return results


async def test_changes_that_arrive_during_a_transaction_form_the_next_one(
    data: DataDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(data, monkeypatch)
    names = [f"conv_{number}" for number in range(50)]
    assert await all_at_once(GroupCommit(data, "x"), list(map(conversation, names)), held) == [None] * 50
    assert held.count == 2
    assert found(data) == set(names)


async def test_a_change_that_fails_takes_no_other_with_it(
    data: DataDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(db: Connection) -> None:
        db.execute("insert into conversations values ('conv_half', 'ann', 1, '{}', 1)", ())
        raise ValueError("planted")

    held = Held(data, monkeypatch)
    changes = [conversation("a"), conversation("b"), item_of_no_conversation, broken, conversation("c")]
    commits = GroupCommit(data, "responses")
    results = await all_at_once(commits, changes, held)
    assert [result is None for result in results] == [True, True, False, False, True]
    assert "foreign key" in str(results[2]).lower()
    assert isinstance(results[3], ValueError)
    assert found(data) == {"a", "b", "c"}
    assert data.failures.counts() == {"responses": 2}
    await commits.write(conversation("d"))
    assert "d" in found(data)


async def test_a_disk_that_fails_is_told_to_all_who_wait_and_the_next_change_is_stored(
    data: DataDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, commits = Held(data, monkeypatch), GroupCommit(data, "x")

    def full(db: Connection) -> None:
        raise StorageFailed("The disk is full.")

    results = await all_at_once(commits, [conversation("a"), conversation("b"), full], held)
    assert results[0] is None
    assert [type(result) for result in results[1:]] == [StorageFailed] * 2
    assert results[1] is not results[2], "each request changes its own error"
    assert found(data) == {"a"}
    await commits.write(conversation("b"))
    assert found(data) == {"a", "b"}


async def test_what_a_client_that_leaves_has_begun_to_store_is_stored(
    data: DataDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, commits = Held(data, monkeypatch), GroupCommit(data, "x")
    async with anyio.create_task_group() as tasks:
        for name in "ab":
            tasks.start_soon(commits.write, conversation(name))
            await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
        Thread(target=lambda: held.go.set()).start()
    assert found(data) == {"a", "b"}


def test_what_a_transaction_has_read_stays_true_until_it_ends(tmp_path: Path) -> None:
    def deleted(other: sqlite3.Connection) -> Any:
        return other.execute("delete from conversations")

    with closing(DataDir(tmp_path)) as data:
        with data.write() as db:
            conversation("a")(db)
        with closing(sqlite3.connect(tmp_path / DATABASE, timeout=0, isolation_level=None)) as other:
            with data.write() as db:
                assert db.execute("select 1 from conversations where id = 'a'").fetchone()
                with pytest.raises(sqlite3.OperationalError, match="locked"):
                    deleted(other)
                db.execute(
                    "insert into conversation_items (conversation, id, bytes, item) values ('a', 'm', 1, ?)",
                    (b"{}",),
                )
            deleted(other)


def test_a_limit_that_threads_check_at_once_is_not_exceeded(tmp_path: Path) -> None:
    """What reads and then writes is right in every store, not only for conversations."""
    with closing(DataDir(tmp_path)) as data:

        def add(number: int) -> Callable[[], None]:
            def work() -> None:
                with data.write() as db:
                    (count,) = db.execute("select count(*) from conversations").fetchone()
                    if count < 1:
                        conversation(f"conv_{number}")(db)

            return work

        threads = [Thread(target=add(number)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found(data)) == 1
