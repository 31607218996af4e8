"""The files of the adapters that are registered.

An adapter's files are in a folder named after its digest, so replacing an adapter touches nothing that
another request, tenant or version uses. A folder stays as long as a row names it or a request holds it. A
folder that a crash left without either is deleted at the next start.

Everything here belongs to the event loop, except what it passes to threads itself, and `put`, `put_again` and
`drop`, which run in the thread of a change.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, suppress
from pathlib import Path

from anyio import Lock, to_thread

from personae.api.database.base import Connection
from personae.api.http.upload import Staging, sync_folder
from personae.api.tenants.data import DataDir
from personae.errors import StorageFailed
from personae.lora.disk import bytes_in
from personae.lora.peft_names import CONFIG_FILE, TENSORS_FILE

STAGING = "staging"
_NAMED = (
    "select 1 from adapters where digest = ? union all "
    "select 1 from adapter_versions where digest = ? limit 1"
)


class RegisteredFiles:
    """The folder of adapters of a data directory, and its object store if it has one."""

    def __init__(self, data: DataDir) -> None:
        self._data = data
        self._held: Counter[str] = Counter()
        self._bringing = Lock()  # one adapter is brought at a time
        self.travel = data.shared  # whether an adapter's files may be elsewhere
        self._staging = Staging(data.adapters / STAGING)
        for folder in data.adapters.iterdir():
            if folder.name != STAGING:
                self.collect(folder.name)
        self._recount()

    def close(self) -> None:
        """Wait until all deletions are done."""
        self._staging.close()

    def stage(self, tenant: str) -> AbstractContextManager[Path]:
        """A folder for an upload; see `Staging.folder`."""
        return self._staging.folder(tenant)

    def stage_in_turn(self, tenant: str) -> AbstractAsyncContextManager[Path]:
        """A folder for an adapter that is on the server already; see `Staging.folder_in_turn`."""
        return self._staging.folder_in_turn(tenant)

    @contextmanager
    def hold(self, digest: str) -> Iterator[None]:
        """Keep an adapter's files while the block runs, whatever happens to its name."""
        self._held[digest] += 1
        try:
            yield
        finally:
            self._held[digest] -= 1
            if not self._held[digest]:
                del self._held[digest]
                self.collect(digest)

    def collect(self, digest: str) -> None:
        """Delete an adapter's files if nothing needs them any more."""
        if digest in self._held or self._data.rows(_NAMED, (digest, digest)):
            return
        self._staging.discard(self._data.adapters / digest)  # none, if it is the server's own

    async def bring(self, digest: str) -> None:
        """Have an adapter's files in this server's folder: from the object store, if they are not there.
        Raises StorageFailed if nobody has them, or they are damaged."""
        folder = self._data.adapters / digest
        if folder.is_dir() or not self._data.rows(_NAMED, (digest, digest)):
            return  # or one that the server began with
        if self._data.objects is None:
            raise StorageFailed("The adapter's files are at another server, and there is no --object-store.")
        async with self._bringing:
            if not folder.is_dir():
                with self.hold(digest):
                    await to_thread.run_sync(self._data.objects.get, object_name(digest), folder)
                    await to_thread.run_sync(self._make_room)

    def put(self, staged: Path, digest: str) -> None:
        """Move a staged adapter to its place, and to the object store. Before the rows change: after a crash
        in between, no row names it."""
        target = self._data.adapters / digest
        if not target.exists():
            os.rename(staged, target)
            sync_folder(self._data.adapters)
        self._store(digest)

    def put_again(self, digest: str) -> None:
        """Put the files into the object store if they are gone: another server removed the last adapter of
        this digest since `put`."""
        objects = self._data.objects
        if objects is not None and not objects.has(object_name(digest)):
            self._store(digest)

    def drop(self, db: Connection, digest: str) -> None:
        """Remove an adapter's files from the object store if no row names them."""
        objects = self._data.objects
        if objects is not None and not db.execute(_NAMED, (digest, digest)).fetchone():
            with suppress(StorageFailed):  # it only takes room
                objects.delete(object_name(digest))

    def _store(self, digest: str) -> None:
        if self._data.objects is not None:
            folder = self._data.adapters / digest
            files = {name: folder / name for name in (CONFIG_FILE, TENSORS_FILE)}
            self._data.objects.put(object_name(digest), files)

    def _make_room(self) -> None:
        """Remove the files that were brought longest ago until the rest fits. The object store has them."""
        found = [
            (each.stat().st_mtime, each) for each in self._data.adapters.iterdir() if each.name != STAGING
        ]
        sizes = {folder: bytes_in(folder) for _, folder in found}
        total = sum(sizes.values())
        for _, folder in sorted(found):
            if total <= self._data.cache_bytes:
                break
            if folder.name not in self._held:
                self._staging.discard(folder)
                total -= sizes[folder]

    def _recount(self) -> None:
        """Count again what adapters take. An earlier version counted the uploaded files, and another
        `--dtype` has another converted file. A shared database has adapters that are not here."""
        if self._data.shared:
            return
        rows = self._data.rows(
            "select digest, bytes from adapters union select digest, bytes from adapter_versions"
        )
        sizes = {digest: bytes_in(self._data.adapters / digest) for digest, _ in rows}
        if changed := {(sizes[digest], digest) for digest, known in rows if sizes[digest] != known}:
            with suppress(StorageFailed), self._data.write() as db:
                for table in ("adapters", "adapter_versions"):
                    db.executemany(f"update {table} set bytes = ? where digest = ?", changed)  # noqa: S608  our own words


def object_name(digest: str) -> str:
    """The name of an adapter's files in an object store."""
    return f"adapters/{digest}"
