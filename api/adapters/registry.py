"""Which tenant has which adapters, and the files of each.

An adapter's files are in a folder named after its digest, so replacing an adapter touches nothing that
another request, tenant or version uses. A folder stays as long as a row names it or a request holds it. A
folder that a crash left without either is deleted at the next start.

Everything here belongs to the event loop, except what it passes to threads itself.
"""

import os
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
from anyio import Lock, to_thread
from msgspec import UNSET, UnsetType

from personae.actors.client import ModelCard
from personae.api.adapters.checker import AdapterChecker, ThreadChecker
from personae.api.database.base import Connection, Row
from personae.api.http.upload import Staging, sync_folder
from personae.api.tenants.data import DataDir
from personae.api.tenants.store import Identity
from personae.errors import Conflict, LoadError, NotFound, QuotaExceeded, StorageFailed
from personae.kernels.sizes import size_text
from personae.lora.bounds import AdapterBounds
from personae.lora.disk import bytes_in
from personae.lora.peft_names import CONFIG_FILE, TENSORS_FILE, targets

STAGING = "staging"
_PUT = (
    "insert into adapters values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) on conflict (tenant, name) do update set "
    "id = excluded.id, version = excluded.version, digest = excluded.digest, ranks = excluded.ranks, "
    "bytes = excluded.bytes, shared = excluded.shared, created = excluded.created, traits = excluded.traits"
)
_NAMED = "select 1 from adapters where digest = ? limit 1"
_BIND = "insert into meta values ('shapes', ?) on conflict (key) do update set value = excluded.value"


class AdapterRecord(msgspec.Struct, frozen=True):
    """A registered adapter, as the API shows it. `bytes` are those on the disk. `traits` name what it has in
    addition to low rank on linear modules, `invocation` has its activating tokens (aLoRA). Admins who list
    other tenants' adapters see the `tenant`."""

    id: str
    name: str
    version: int
    sha256: str
    ranks: dict[str, int]
    targets: list[str]
    bytes: int
    created: int
    base_model: str
    shared: bool
    traits: tuple[str, ...] = ()
    invocation: tuple[int, ...] = ()
    tenant: str | UnsetType = UNSET
    object: str = "adapter"

    def card(self) -> ModelCard:
        """The adapter as a model that requests may name."""
        rank = max(self.ranks.values(), default=0)
        return ModelCard(
            self.name, self.sha256, self.created, self.base_model, rank, self.traits, self.invocation
        )


class _Traits(msgspec.Struct, frozen=True):
    """The content of a row's column `traits`."""

    traits: tuple[str, ...] = ()
    invocation: tuple[int, ...] = ()


class Registry:
    """The adapters of a data directory, for one base.

    `reserved` are names that the server itself uses. `checker` checks uploads; None: a thread does.
    Raises LoadError if the directory's adapters are for a base with other shapes.
    """

    def __init__(
        self,
        data: DataDir,
        base: str,
        reserved: Collection[str],
        bounds: AdapterBounds,
        checker: AdapterChecker | None = None,
    ) -> None:
        self._data = data
        self._base = base
        self._reserved = reserved
        self._bounds = bounds
        self._held: Counter[str] = Counter()
        self._lock = Lock()
        self._bringing = Lock()  # one adapter is brought at a time
        self.travels = data.shared  # whether the files of an adapter may be elsewhere
        self._checker = ThreadChecker() if checker is None else checker
        shapes = bounds.shapes
        self._bind(f"{shapes.layers} {sorted(shapes.modules.items())}{' merged' * shapes.merged}")
        self._staging = Staging(data.adapters / STAGING)
        for folder in data.adapters.iterdir():
            if folder.name != STAGING:
                self._collect(folder.name)
        self._recount()

    def close(self) -> None:
        """Wait until all deletions are done."""
        self._checker.close()
        self._staging.close()

    def find(self, tenant: str, name: str) -> AdapterRecord | None:
        """The tenant's adapter of that name, else one that is shared."""
        rows = self._data.rows(
            "select * from adapters where name = ? and (tenant = ? or shared) "
            "order by tenant <> ?, created, tenant limit 1",
            (name, tenant, tenant),
        )
        return self._record(rows[0]) if rows else None

    def names_of(self, digest: str) -> set[str]:
        """The names under which tenants know an adapter."""
        rows = self._data.rows("select distinct name from adapters where digest = ?", (digest,))
        return {row["name"] for row in rows}

    def list(self, tenant: str) -> list[AdapterRecord]:
        """All adapters that `find` would find, by name."""
        rows = self._data.rows(
            "select * from adapters where tenant = ? or shared order by name, tenant <> ?, created, tenant",
            (tenant, tenant),
        )
        found: dict[str, AdapterRecord] = {}
        for row in rows:
            if row["name"] not in found:
                found[row["name"]] = self._record(row)
        return list(found.values())

    def own(self, tenant: str | None) -> tuple[AdapterRecord, ...]:
        """A tenant's own adapters, or those of all tenants, each with its tenant."""
        rows = self._data.rows(
            "select * from adapters where ? is null or tenant = ? order by tenant, name", (tenant, tenant)
        )
        return tuple(msgspec.structs.replace(self._record(row), tenant=row["tenant"]) for row in rows)

    def count(self) -> int:
        """The number of all tenants' adapters."""
        (count,) = self._data.rows("select count(*) from adapters")[0]
        return int(count)

    async def bring(self, digest: str) -> None:
        """Have an adapter's files in this server's folder: from the object store, if they are not there.
        Raises StorageFailed if nobody has them, or they are damaged."""
        folder = self._data.adapters / digest
        if folder.is_dir() or not self._data.rows("select 1 from adapters where digest = ?", (digest,)):
            return  # or one that the server began with
        if self._data.objects is None:
            raise StorageFailed("The adapter's files are at another server, and there is no --object-store.")
        async with self._bringing:
            if not folder.is_dir():
                with self.hold(digest):
                    await to_thread.run_sync(self._data.objects.get, object_name(digest), folder)
                    await to_thread.run_sync(self._make_room)

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
                self._collect(digest)

    def stage(self, tenant: str) -> AbstractContextManager[Path]:
        """A folder for an upload; see `Staging.folder`."""
        return self._staging.folder(tenant)

    def stage_in_turn(self, tenant: str) -> AbstractAsyncContextManager[Path]:
        """A folder for an adapter that is on the server already; see `Staging.folder_in_turn`."""
        return self._staging.folder_in_turn(tenant)

    def check_room(self, who: Identity, size: int) -> None:
        """Raises QuotaExceeded if the tenant may not have `size` more bytes of adapters."""
        self._storage_quota(who, 0).check(size)

    def _storage_quota(self, who: Identity, freed: int) -> "_StorageQuota":
        """The tenant's storage, if `freed` bytes of its adapters are removed."""
        (used,) = self._data.rows("select total(bytes) from adapters where tenant = ?", (who.tenant,))[0]
        return _StorageQuota(int(used) - freed, who.limits.bytes)

    def check_name(self, who: Identity, name: str, replace: bool) -> Row | None:
        """The row that has the name now. Raises Conflict, or QuotaExceeded if the tenant would have too many
        adapters."""
        if name in self._reserved:
            raise Conflict(f"The name `{name}` is the server's own; choose another.", param="name")
        rows = self._data.rows("select * from adapters where tenant = ? and name = ?", (who.tenant, name))
        if rows and not replace:
            raise Conflict(
                f"There is an adapter `{name}`; `replace` puts another in its place.", param="name"
            )
        if not rows:
            (count,) = self._data.rows("select count(*) from adapters where tenant = ?", (who.tenant,))[0]
            limit = who.limits.adapters
            if limit is not None and count >= limit:
                raise QuotaExceeded(
                    f"This tenant has {count} adapters, which is its limit. Remove one first."
                )
        return rows[0] if rows else None

    async def add(
        self, who: Identity, name: str, folder: Path, *, replace: bool, shared: bool
    ) -> AdapterRecord:
        """Check a staged adapter against the base and register it under the name.

        Raises AdapterError, Conflict or QuotaExceeded; nothing has changed then.
        """
        old = self.check_name(who, name, replace)
        room = self._storage_quota(who, old["bytes"] if old else 0)
        read = await self._checker.check(folder, self._bounds, room.left)
        digest, size = read.digest, read.bytes
        room.check(size)
        async with self._lock:
            old = self.check_name(who, name, replace)
            self._storage_quota(who, old["bytes"] if old else 0).check(size)
            row = (
                who.tenant,
                name,
                f"adapter-{secrets.token_hex(12)}",
                old["version"] + 1 if old else 1,
                digest,
                msgspec.json.encode(read.ranks).decode(),
                size,
                shared,
                int(time.time()),
                msgspec.json.encode(_Traits(read.traits, read.invocation)).decode(),
            )
            with self.hold(digest):
                await to_thread.run_sync(self._commit, folder, digest, row)
            if old:
                self._collect(old["digest"])
        return self._record(self._data.rows("select * from adapters where id = ?", (row[2],))[0])

    async def remove(self, tenant: str, name: str) -> None:
        """Remove the tenant's own adapter of that name. Raises NotFound, and Conflict for one of the server's
        own."""
        if name in self._reserved:
            raise Conflict(f"`{name}` is the server's own and stays as long as it runs.", param="name")
        async with self._lock:
            rows = self._data.rows("select * from adapters where tenant = ? and name = ?", (tenant, name))
            if not rows:
                raise no_such_adapter(name)
            await to_thread.run_sync(self._delete, rows[0]["id"], rows[0]["digest"])
            self._collect(rows[0]["digest"])

    def _commit(self, folder: Path, digest: str, row: tuple[object, ...]) -> None:
        """Move the files first, then add the row: after a crash in between, no row names them."""
        target = self._data.adapters / digest
        if not target.exists():
            os.rename(folder, target)
            sync_folder(self._data.adapters)
        objects, name = self._data.objects, object_name(digest)
        files = {each: target / each for each in (CONFIG_FILE, TENSORS_FILE)}
        if objects is not None:
            objects.put(name, files)
        with self._data.write() as db:
            db.execute(_PUT, row)
            if objects is not None and not objects.has(name):
                objects.put(name, files)  # another server removed the last adapter of this digest meanwhile

    def _recount(self) -> None:
        """Count again what adapters take. An earlier version counted the uploaded files, and another
        `--dtype` has another converted file. A shared database has adapters that are not here."""
        if self._data.shared:
            return
        rows = self._data.rows("select distinct digest, bytes from adapters")
        sizes = {digest: bytes_in(self._data.adapters / digest) for digest, _ in rows}
        if changed := {(sizes[digest], digest) for digest, known in rows if sizes[digest] != known}:
            with suppress(StorageFailed), self._data.write() as db:
                db.executemany("update adapters set bytes = ? where digest = ?", changed)

    def _delete(self, id: str, digest: str) -> None:
        objects = self._data.objects

        def change(db: Connection) -> None:
            db.execute("delete from adapters where id = ?", (id,))
            if objects is not None and not db.execute(_NAMED, (digest,)).fetchone():
                with suppress(StorageFailed):  # it only takes room
                    objects.delete(object_name(digest))

        self._data.urgently(change)

    def _collect(self, digest: str) -> None:
        """Delete an adapter's files if nothing needs them any more."""
        if digest in self._held or self._data.rows("select 1 from adapters where digest = ?", (digest,)):
            return
        self._staging.discard(self._data.adapters / digest)  # none, if it is the server's own

    def _bind(self, shapes: str) -> None:
        """Check that the directory's adapters were checked against these shapes, or that it has none yet."""
        known = self._data.rows("select value from meta where key = 'shapes'")
        if known and known[0][0] != shapes.encode() and self._data.rows("select 1 from adapters limit 1"):
            raise LoadError(
                f"--data-dir {self._data.path}: its adapters are for a base of other shapes; "
                "use another directory for this model."
            )
        if not known or known[0][0] != shapes.encode():
            with self._data.write() as db:
                db.execute(_BIND, (shapes.encode(),))

    def _record(self, row: Row) -> AdapterRecord:
        ranks = msgspec.json.decode(row["ranks"], type=dict[str, int])
        traits = msgspec.json.decode(row["traits"], type=_Traits)
        return AdapterRecord(
            id=row["id"],
            name=row["name"],
            version=row["version"],
            sha256=row["digest"],
            ranks=ranks,
            targets=targets(ranks, self._bounds.shapes),
            bytes=row["bytes"],
            created=row["created"],
            base_model=self._base,
            shared=bool(row["shared"]),
            traits=traits.traits,
            invocation=traits.invocation,
        )


class _StorageQuota(NamedTuple):
    """The bytes that a tenant's adapters use, and the limit (None: no limit)."""

    used: int
    limit: int | None

    @property
    def left(self) -> int | None:
        """How many more bytes there may be; None: no limit."""
        return None if self.limit is None else self.limit - self.used

    def check(self, size: int) -> None:
        """Raises QuotaExceeded if `size` more are too many."""
        if self.limit is not None and self.used + size > self.limit:
            raise QuotaExceeded(
                f"This tenant's adapters have {size_text(self.used, needed=True)} of at most "
                f"{size_text(self.limit)}; {size_text(size, needed=True)} more do not fit. Remove one first."
            )


def object_name(digest: str) -> str:
    """The name of an adapter's files in an object store."""
    return f"adapters/{digest}"


def no_such_adapter(name: str) -> NotFound:
    """The same error for another tenant's adapter as for one that does not exist."""
    return NotFound(f"There is no adapter `{name[:80]}`.", param="name", code="adapter_not_found")
