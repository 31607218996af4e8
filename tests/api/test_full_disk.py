"""On a full disk what stores is a 503, what deletes and revokes works."""

import errno
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from batch_fixture import CHAT, jsonl, request
from full_disk import UNSHARE, FullConnection, can_mount
from typer.testing import CliRunner
from uploads import open_fixture, upload, whole

from personae.api.app import create_app
from personae.api.batches.journal import Journal
from personae.api.batches.manager import BatchManager
from personae.api.batches.model import OutputLine
from personae.api.cli import app
from personae.api.settings import ApiSettings
from personae.api.storage import RESERVE_BYTES, Reserve, storage_failure
from personae.api.tenants.data import DATABASE, RESERVE, DataDir
from personae.api.tenants.store import TenantLimits, TenantStore
from personae.api.wire.errors import visible
from personae.lora import disk

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).resolve().parents[2]
REFUSED = [503, "storage_failed", "30"]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """From when this is called on SQLite writes nothing while there is a reserve; True: nor without."""
    connect = sqlite3.connect

    def full_connect(*args: Any, **options: Any) -> sqlite3.Connection:
        return connect(*args, factory=FullConnection, **options)

    def begin(always: bool) -> None:
        monkeypatch.setattr(FullConnection, "always", always)
        monkeypatch.setattr(sqlite3, "connect", full_connect)

    return begin


def test_a_disk_that_is_really_full_refuses_what_stores_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    if not can_mount(folder):
        pytest.skip("this machine gives nobody a disk of their own (unshare -Urm)")
    paths = os.pathsep.join(str(ROOT / each) for each in (".pkg", "tests/support"))
    done = subprocess.run(
        [*UNSHARE, sys.executable, ROOT / "tests/support/full_disk.py", folder],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    delivered = json.loads(done.stdout)
    for what in ("upload an adapter", "upload a file", "start a batch"):
        assert delivered[what] == REFUSED, what
    assert delivered["create a key"] == [
        1, "error: The server's disk is full; delete something, or try again later.\n"
    ]  # fmt: skip
    for what in ("delete the adapter", "delete the file", "cancel the batch"):
        assert delivered[what] == [200, None, None], what
    assert (delivered["the adapter is gone"], delivered["the file is gone"]) == (404, 404)
    assert delivered["revoke a key"] == delivered["revoke a key without a server"] == [0, "key revoked\n"]
    assert delivered["list keys"][0] == 0
    assert delivered["revoke the tenant"] == [0, "tenant ann revoked\n"]
    assert (delivered["the key works"], delivered["keys that work"]) == (False, 0)


async def test_a_full_database_is_a_503_that_leaves_nothing_behind_and_deleting_uses_the_reserve(
    tmp_path: Path, full: Callable[[bool], None]
) -> None:
    with open_fixture(tmp_path) as fixture, closing(BatchManager(fixture.data, fixture.tenants)) as batches:
        fixture.app = create_app(
            fixture.engine, tenants=fixture.tenants, registry=fixture.registry, batches=batches
        )
        key = fixture.key("ann")
        async with fixture.client(key) as client:
            assert (await upload(client, "poet", whole())).status_code == 201
            parts = {"file": ("in.jsonl", jsonl([request("a")]))}
            file = (await client.post("/v1/files", data={"purpose": "batch"}, files=parts)).json()["id"]
            full(False)
            body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
            for answer in (
                await upload(client, "other", whole(seed=1)),
                await client.post("/v1/files", data={"purpose": "batch"}, files=parts),
                await client.post("/v1/batches", json=body),
            ):
                error = answer.json()["error"]
                assert [answer.status_code, error["code"], answer.headers["retry-after"]] == REFUSED
                assert error["message"].startswith("The server's disk is full")
            assert not fixture.leftovers()
            assert [path.name for path in fixture.data.files.iterdir() if path.name != "staging"] == [file]
            assert (await client.delete("/v1/adapters/poet")).status_code == 200
            assert (await client.delete(f"/v1/files/{file}")).status_code == 200
            assert not fixture.leftovers()
        assert (tmp_path / RESERVE).stat().st_size == RESERVE_BYTES, "it is there again"
        fixture.tenants.revoke_key(key)
        assert fixture.tenants.identify(key) is None


def test_a_key_that_cannot_be_revoked_is_told_to_work_still(
    tmp_path: Path, full: Callable[[bool], None]
) -> None:
    with closing(DataDir(tmp_path)) as data:
        store = TenantStore(data)
        store.create_tenant("ann", TenantLimits())
        key = store.create_key("ann", "tenant")
        full(True)
        for line, who in (("keys revoke " + key, "The key"), ("tenants revoke ann", "Tenant ann")):
            done = CliRunner().invoke(app, [*line.split(), "--data-dir", str(tmp_path)])
            assert done.exit_code == 2
            assert len(done.output.splitlines()) == 1
            assert f"error: {who} was NOT revoked and still works: " in done.output
            assert "disk is full" in done.output
        assert store.identify(key) is not None


async def test_the_last_of_a_disk_is_not_taken_by_uploads_batches_and_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = ApiSettings(adapter_root=(tmp_path / "roots",))
    folder = tmp_path / "roots" / "poet"
    folder.mkdir(parents=True)
    for name, content in whole().items():
        (folder / name).write_bytes(content)
    with open_fixture(tmp_path / "data", settings=roots) as fixture:
        journal = Journal(tmp_path / "batch")
        line = OutputLine("1", "a", None, None)
        monkeypatch.setattr(disk, "KEPT_FREE", 2**62)
        async with fixture.client(fixture.key("ann", "admin")) as client:
            uploaded = await upload(client, "poet", whole())
            loaded = await client.post(
                "/v1/load_lora_adapter", json={"lora_name": "poet", "lora_path": str(folder)}
            )
        for answer in (uploaded, loaded):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_failed")
        with pytest.raises(OSError, match="No space left"):
            journal.write([line])
        assert not fixture.leftovers()
        monkeypatch.undo()
        journal.write([line])
        assert journal.done == {"a"}


def test_a_reserve_is_as_large_as_the_disk_allows_and_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate, room = os.posix_fallocate, 300_000

    def some(file: int, offset: int, size: int) -> None:
        if size > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(file, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", some)
    reserve = Reserve(tmp_path / "reserve")
    assert not reserve.release(), "there is none yet"
    reserve.keep()
    assert (tmp_path / "reserve").stat().st_size == RESERVE_BYTES // 4
    room = 2**30
    reserve.keep()
    assert (tmp_path / "reserve").stat().st_size == RESERVE_BYTES
    assert reserve.release()
    assert not reserve.release()
    assert (tmp_path / "reserve").stat().st_blocks == 0


@pytest.mark.parametrize(
    ("error", "delivered"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/secret"), "disk is full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/secret"), "disk is full"),
        (OSError(errno.EIO, "Input/output error", "/secret"), "Input/output error"),
        (OSError(errno.EROFS, "Read-only file system", "/secret"), "Read-only"),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset"), None),
        (sqlite3.OperationalError("no such table: keys"), None),
        (ValueError("x"), None),
    ],
)
def test_what_a_disk_refuses_is_told_and_no_path_of_it(error: Exception, delivered: str | None) -> None:
    failure = storage_failure(error)
    shown = visible(error, "1")
    if delivered is None:
        assert failure is None
        assert shown.status == 500
    else:
        assert failure is not None
        assert delivered in failure.message
        assert "/secret" not in failure.message
        assert (shown.status, shown.code, shown.message) == (503, "storage_failed", failure.message)


def test_a_database_that_is_locked_or_damaged_is_a_storage_failure_too(tmp_path: Path) -> None:
    with closing(DataDir(tmp_path)) as data, closing(sqlite3.connect(tmp_path / DATABASE)) as other:
        other.execute("pragma journal_mode = wal")
        other.execute("begin immediate")
        waits = closing(sqlite3.connect(tmp_path / DATABASE, timeout=0))
        with waits as db, pytest.raises(sqlite3.OperationalError) as locked:
            db.execute("begin immediate")
        failure = storage_failure(locked.value)
        assert failure is not None
        assert "locked" in failure.message
        with pytest.raises(sqlite3.OperationalError) as wrong:
            data.rows("select nothing from nowhere")
        assert storage_failure(wrong.value) is None, "our own mistake"
