"""A full disk: a tmpfs in a namespace of its own, which needs no root; and SQLite with the same errors.

    unshare -Urm python full_disk.py FOLDER

This mounts a small disk at FOLDER, uses an app on it, fills it to its last byte with other data, and prints
the result of each request and command as JSON.
"""

import errno
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

SIZE = 24 * 2**20
UNSHARE = ("unshare", "-Urm")


def can_mount(folder: Path) -> bool:
    """Whether this machine allows us to mount a disk."""
    if shutil.which("unshare") is None:
        return False
    mount = f"mount -t tmpfs -o size={SIZE} tmpfs {folder}"
    return subprocess.run([*UNSHARE, "sh", "-c", mount], capture_output=True).returncode == 0


class FullConnection(sqlite3.Connection):
    """Refuses writes while the database's folder has a reserve."""

    always = False

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        """Execute it, unless it writes."""
        if sql.split()[0] in ("insert", "update", "delete"):
            reserve = Path(self.path()) / "reserve"
            if self.always or (reserve.exists() and reserve.stat().st_size):
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorcode = sqlite3.SQLITE_FULL
                raise error
        return super().execute(sql, *values)

    def executemany(self, sql: str, rows: Any) -> sqlite3.Cursor:  # type: ignore[override]  # our parameters are lists
        """Execute it for each."""
        for row in rows:
            cursor = self.execute(sql, row)
        return cursor

    def path(self) -> str:
        """The folder of the database."""
        return os.path.dirname(super().execute("pragma database_list").fetchone()["file"])


def fill(folder: Path) -> None:
    """Fill the disk to the last byte."""
    with (folder / "ballast").open("ab", buffering=0) as file:
        for size in (2**20, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def command(line: str) -> tuple[int, str]:
    """Run a `personae` command. Returns its exit code and output."""
    code = "from personae.api.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *line.split()], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


async def _use(folder: Path) -> dict[str, Any]:
    import anyio
    import httpx
    from batch_fixture import CHAT, jsonl, request
    from fake_engine import FakeEngine
    from uploads import BOUNDS, upload, whole

    from personae.api.adapters.registry import Registry
    from personae.api.app import create_app
    from personae.api.batches.manager import BatchManager
    from personae.api.tenants.data import DataDir
    from personae.api.tenants.store import TenantLimits, TenantStore

    delivered: dict[str, Any] = {}
    path, engine = folder / "data", FakeEngine(hold_after=1)
    models = engine.models("default")
    with (
        closing(DataDir(path)) as data,
        closing(Registry(data, next(iter(models)), set(models), BOUNDS)) as registry,
        closing(BatchManager(data, tenants := TenantStore(data))) as batches,
    ):
        tenants.create_tenant("ann", TenantLimits())
        key, other = (tenants.create_key("ann", "tenant") for _ in range(2))
        headers = {"authorization": f"Bearer {key}"}
        app = create_app(engine, None, tenants=tenants, registry=registry, batches=batches)
        transport = httpx.ASGITransport(app)
        async with (
            batches.running(app.state.services),
            httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client,
        ):

            async def file() -> httpx.Response:
                parts = {"file": ("in.jsonl", jsonl([request("a")]))}
                return await client.post("/v1/files", data={"purpose": "batch"}, files=parts)

            async def batch(id: str) -> httpx.Response:
                body = {"input_file_id": id, "endpoint": CHAT, "completion_window": "24h"}
                return await client.post("/v1/batches", json=body)

            def note(what: str, response: httpx.Response) -> None:
                error = response.json().get("error") or {}
                delivered[what] = [
                    response.status_code,
                    error.get("code"),
                    response.headers.get("retry-after"),
                ]

            for name in ("one", "two"):
                assert (await upload(client, name, whole(seed=len(name)))).status_code == 201
            files = [(await file()).json()["id"] for _ in range(2)]
            running = (await batch(files[0])).json()["id"]
            while (await client.get(f"/v1/batches/{running}")).json()["status"] == "validating":  # noqa: ASYNC110  as a client does
                await anyio.sleep(0.01)
            fill(folder)
            note("upload an adapter", await upload(client, "three", whole(seed=9)))
            note("upload a file", await file())
            note("start a batch", await batch(files[1]))
            delivered["create a key"] = command(f"keys create ann --data-dir {path}")
            for what, url in (("adapter", "/v1/adapters/two"), ("file", f"/v1/files/{files[1]}")):
                fill(folder)
                note(f"delete the {what}", await client.delete(url))
                delivered[f"the {what} is gone"] = (await client.get(url)).status_code
            fill(folder)
            note("cancel the batch", await client.post(f"/v1/batches/{running}/cancel"))
            fill(folder)
            delivered["revoke a key"] = command(f"keys revoke {other} --data-dir {path}")
            delivered["the key works"] = tenants.identify(other) is not None
            fill(folder)
    delivered["revoke a key without a server"] = command(f"keys revoke {key} --data-dir {path}")
    fill(folder)
    delivered["list keys"] = command(f"keys list --data-dir {path}")
    fill(folder)
    delivered["revoke the tenant"] = command(f"tenants revoke ann --data-dir {path}")
    (folder / "ballast").unlink()
    with closing(DataDir(path)) as data:
        delivered["keys that work"] = sum(
            TenantStore(data).identify(each) is not None for each in (key, other)
        )
    return delivered


if __name__ == "__main__":
    import anyio

    disk = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", disk], check=True)
    print(json.dumps(anyio.run(_use, disk)))
