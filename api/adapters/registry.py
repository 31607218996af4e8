"""What changes the adapters that are registered.

Everything here belongs to the event loop, except what it passes to threads itself.
"""

import secrets
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import (
    asynccontextmanager,
)
from pathlib import Path
from typing import NamedTuple

import msgspec
from anyio import Lock, to_thread

from personae.api.adapters.aliases import Aliases
from personae.api.adapters.checker import AdapterChecker, ThreadChecker
from personae.api.adapters.defaults import RequestDefaults, encode_defaults
from personae.api.adapters.files import RegisteredFiles
from personae.api.adapters.records import (
    AdapterRecord,
    AdapterRecords,
    AdapterTraits,
    no_such_adapter,
    no_such_version,
    ranks_of,
)
from personae.api.database.base import Connection, TableRow
from personae.api.tenants.data import DataDir
from personae.api.tenants.store import Identity
from personae.errors import (
    AdapterError,
    Conflict,
    LoadError,
    QuotaExceeded,
)
from personae.kernels.sizes import size_text
from personae.lora.bounds import AdapterBounds

_KEY = ("tenant", "name")
_COLUMNS = (
    *_KEY,
    *(
        "id",
        "version",
        "digest",
        "ranks",
        "bytes",
        "shared",
        "created",
        "traits",
        "source",
        "defaults",
        "base",
    ),
)
_VALUES = f"({', '.join(_COLUMNS)}) values ({', '.join('?' * len(_COLUMNS))})"
_PUT = f"insert into adapters {_VALUES} on conflict (tenant, name) do update set " + ", ".join(
    f"{name} = excluded.{name}" for name in _COLUMNS if name not in _KEY
)
_KEEP = f"insert into adapter_versions {_VALUES}"
_SET = (
    "insert into adapter_settings (tenant, name, id, newest, pinned, keep_loaded) values (?, ?, ?, ?, ?, ?) "
    "on conflict (tenant, name) do update set newest = excluded.newest, pinned = excluded.pinned, "
    "keep_loaded = excluded.keep_loaded"
)
KEPT_VERSIONS = 5
"""How many versions of a name are kept besides the one that serves it."""
_BIND = "insert into meta values (?, ?) on conflict (key) do update set value = excluded.value"


class Registry(AdapterRecords):
    """The adapters of a data directory, each for one base. `base` is the first base; `add_base` adds others.

    `reserved` are names that the server itself uses. `checker` checks uploads; None: a thread does. Besides
    the one that serves a name, `kept_versions` of its versions are kept.
    Raises LoadError if the directory's adapters are for a base with other shapes.
    """

    def __init__(
        self,
        data: DataDir,
        base: str,
        reserved: Collection[str],
        bounds: AdapterBounds,
        checker: AdapterChecker | None = None,
        kept_versions: int = KEPT_VERSIONS,
    ) -> None:
        super().__init__(data, base)
        self._reserved = set(reserved)
        self._kept_versions = kept_versions
        self.aliases = Aliases(data)
        self._lock = Lock()
        self._requested: dict[tuple[str, str], tuple[Lock, int]] = {}
        self._checker = ThreadChecker() if checker is None else checker
        self._learn("", bounds)
        self.files = RegisteredFiles(data)

    def add_base(self, base: str, reserved: Iterable[str], bounds: AdapterBounds) -> None:
        """Take adapters for one more base, which has these names. Raises LoadError if the directory's
        adapters of that name are for a base with other shapes."""
        self._reserved.update(reserved)
        if base != self.base:
            self._learn(base, bounds)

    def reserve(self, names: Iterable[str]) -> None:
        """Give these names to no adapter from now on."""
        self._reserved.update(names)

    def _learn(self, key: str, bounds: AdapterBounds) -> None:
        shapes = bounds.shapes
        self._bind(key, f"{shapes.layers} {sorted(shapes.modules.items())}{' merged' * shapes.merged}")
        self._bounds[key] = bounds

    def close(self) -> None:
        """Wait until all deletions are done."""
        self._checker.close()
        self.files.close()

    @asynccontextmanager
    async def one_at_a_time(self, tenant: str, name: str) -> AsyncIterator[None]:
        """Let no other block of this name run at the same time."""
        lock, waiting = self._requested.get((tenant, name), (Lock(), 0))
        self._requested[tenant, name] = (lock, waiting + 1)
        try:
            async with lock:
                yield
        finally:
            lock, waiting = self._requested.pop((tenant, name))
            if waiting > 1:
                self._requested[tenant, name] = (lock, waiting - 1)

    def check_room(self, who: Identity, size: int) -> None:
        """Raises QuotaExceeded if the tenant may not have `size` more bytes of adapters."""
        self._storage_quota(who, 0).check(size)

    def _storage_quota(self, who: Identity, freed: int) -> "_StorageQuota":
        """The tenant's storage, if `freed` bytes of its adapters are removed."""
        (used,) = self._data.rows("select total(bytes) from adapters where tenant = ?", (who.tenant,))[0]
        return _StorageQuota(int(used) - freed, who.limits.bytes)

    def check_name(self, who: Identity, name: str, replace: bool) -> TableRow | None:
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
        self,
        who: Identity,
        name: str,
        folder: Path,
        *,
        replace: bool,
        shared: bool,
        source: str = "",
        defaults: RequestDefaults | None = None,
        base: str | None = None,
    ) -> AdapterRecord:
        """Check a staged adapter against its base, None for the first, and register it under the name.
        Without `defaults` it has those of the version that the name means until then.

        Raises AdapterError, Conflict or QuotaExceeded; nothing has changed then.
        """
        key = self._key(base)
        old = self._check_base(self.check_name(who, name, replace), key)
        room = self._storage_quota(who, old["bytes"] if old else 0)
        read = await self._checker.check(folder, self._bounds[key], room.left)
        digest, size = read.digest, read.bytes
        room.check(size)
        async with self._lock:
            old = self._check_base(self.check_name(who, name, replace), key)
            known = self._settings(who.tenant, name)
            newest = max(known.newest, old["version"] if old else 0) + 1
            serves = old is None or not known.pinned
            row = (
                who.tenant,
                name,
                f"adapter-{secrets.token_hex(12)}",
                newest,
                digest,
                msgspec.json.encode(read.ranks).decode(),
                size,
                shared,
                int(time.time()),
                msgspec.json.encode(AdapterTraits(read.traits, read.invocation)).decode(),
                source,
                encode_defaults(defaults) if defaults is not None else old["defaults"] if old else "{}",
                key,
            )
            retired = old if serves else None
            dropped = self._dropped(who, name, size, retired)
            change = _Change(
                row,
                serves,
                retired if retired is not None and retired not in dropped else None,
                dropped,
                (who.tenant, name, known.id, newest, int(known.pinned), int(known.keep_loaded)),
            )
            if serves and known.keep_loaded:
                self._check_kept_loaded(key, (who.tenant, name), read.ranks)
            with self.files.hold(digest):
                await to_thread.run_sync(self._commit, folder, digest, change)
            for each in dropped:
                self.files.collect(each["digest"])
        found = self.find(who.tenant, f"{name}@{newest}")
        assert found is not None, "it was just registered"
        return found

    def _check_base(self, old: TableRow | None, key: str) -> TableRow | None:
        """The row, if its next version may be for this base. Raises Conflict."""
        if old is not None and old["base"] != key:
            raise Conflict(
                f"`{old['name']}` is an adapter of the base `{old['base'] or self.base}`; all versions of a "
                "name are for one base.",
                param="base_model",
            )
        return old

    def _dropped(self, who: Identity, name: str, size: int, retired: TableRow | None) -> list[TableRow]:
        """The versions that go when one of `size` bytes is added to a name and `retired` no longer serves it:
        those of the name that are too many, then the oldest of all names until the rest fits. Those that an
        alias names stay. Raises QuotaExceeded."""
        kept = list(self._data.rows("select * from adapter_versions where tenant = ?", (who.tenant,)))
        kept += [] if retired is None else [retired]
        kept.sort(key=lambda row: (row["created"], row["version"]))
        aliased = self.aliases.targets(who.tenant)
        free = [row for row in kept if f"{row['name']}@{row['version']}" not in aliased]
        same = sorted((row for row in free if row["name"] == name), key=lambda row: row["version"])
        count = sum(row["name"] == name for row in kept)
        dropped = same[: max(count - self._kept_versions, 0)]
        used = self._storage_quota(who, 0).used + sum(row["bytes"] for row in kept if row is not retired)
        for row in [row for row in free if row not in dropped]:
            if who.limits.bytes is None or used - _bytes(dropped) + size <= who.limits.bytes:
                break
            dropped.append(row)
        _StorageQuota(used - _bytes(dropped), who.limits.bytes).check(size)
        return dropped

    def _check_aliases(self, tenant: str, gone: set[str]) -> None:
        """Raises Conflict if an alias of the tenant names one of these models."""
        if used := sorted(gone & self.aliases.targets(tenant)):
            raise Conflict(f"An alias names `{used[0]}`; change or remove the alias first.", param="name")

    async def pin(self, tenant: str, name: str, version: int | None) -> AdapterRecord:
        """Have the name mean this version from now on, whatever is uploaded later; None: the newest again.
        Raises NotFound."""
        async with self._lock:
            served, settings = self._own_row(tenant, name), self._settings(tenant, name)
            kept = {row["version"]: row for row in self._versions_of(tenant, name)}
            wanted = max([*kept, served["version"]]) if version is None else version
            if wanted != served["version"] and wanted not in kept:
                raise no_such_version(name, wanted, [*kept, served["version"]])
            newest = max(settings.newest, served["version"])
            row = (tenant, name, settings.id, newest, int(version is not None), int(settings.keep_loaded))
            if settings.keep_loaded and wanted != served["version"]:
                self._check_kept_loaded(served["base"], (tenant, name), ranks_of(kept[wanted]))

            def change() -> None:
                with self._data.write() as db:
                    if wanted != served["version"]:
                        db.execute("delete from adapter_versions where id = ?", (kept[wanted]["id"],))
                        db.execute(_PUT, tuple(kept[wanted][column] for column in _COLUMNS))
                        db.execute(_KEEP, tuple(served[column] for column in _COLUMNS))
                    db.execute(_SET, row)

            await to_thread.run_sync(change)
        return self._records([self._own_row(tenant, name)], tenant)[0]

    async def keep_loaded(self, tenant: str, name: str, keep: bool) -> AdapterRecord:
        """Have what the name means stay on the device from now on, or no longer. Raises NotFound, and
        Conflict if too little would be left for others."""
        async with self._lock:
            served, known = self._own_row(tenant, name), self._settings(tenant, name)
            if keep:
                self._check_kept_loaded(served["base"], (tenant, name), ranks_of(served))
            newest = max(known.newest, served["version"])
            row = (tenant, name, known.id, newest, int(known.pinned), int(keep))

            def change() -> None:
                with self._data.write() as db:
                    db.execute(_SET, row)

            await to_thread.run_sync(change)
        return self._records([self._own_row(tenant, name)], tenant)[0]

    def kept_loaded(self, base: str) -> tuple[str, ...]:
        """The digests of the adapters that stay on the device, for one base."""
        return tuple(sorted({row["digest"] for row in self._rows_kept_loaded(self._key(base))}))

    def _rows_kept_loaded(self, key: str) -> Sequence[TableRow]:
        return self._data.rows(
            "select a.* from adapters a join adapter_settings s on a.tenant = s.tenant and a.name = s.name "
            "where s.keep_loaded <> 0 and a.base = ?",
            (key,),
        )

    def _check_kept_loaded(self, key: str, of: tuple[str, str], ranks: Mapping[str, int]) -> None:
        """Raises Conflict if the device could not keep an adapter with these ranks as what a tenant's name
        means."""
        bounds = self._bounds.get(key)
        if bounds is None:
            return  # a base that has not been started; it checks nothing until then
        others = [row for row in self._rows_kept_loaded(key) if (row["tenant"], row["name"]) != of]
        try:
            bounds.check_kept_loaded([*map(ranks_of, others), ranks])
        except AdapterError as error:
            raise Conflict(f"`{of[1]}` cannot stay loaded: {error.message}.", param="keep_loaded") from None

    async def set_defaults(self, tenant: str, name: str, defaults: RequestDefaults) -> AdapterRecord:
        """Replace the defaults of the version that the tenant's own name, or `name@N`, means. Raises
        NotFound."""
        async with self._lock:
            row = self._own_version(tenant, name)
            values = (encode_defaults(defaults), row["id"])

            def change() -> None:
                with self._data.write() as db:
                    for table in ("adapters", "adapter_versions"):
                        db.execute(f"update {table} set defaults = ? where id = ?", values)  # noqa: S608  our own words

            await to_thread.run_sync(change)
            return self._records([self._own_version(tenant, name)], tenant)[0]

    async def remove(self, tenant: str, name: str) -> None:
        """Remove the tenant's own adapter of that name with all its versions, or one version of it, `name@N`.

        Raises NotFound, and Conflict for one of the server's own, for the version that serves the name while
        there are others, and for what an alias names.
        """
        if name in self._reserved:
            raise Conflict(f"`{name}` is the server's own and stays as long as it runs.", param="name")
        name, at, number = name.partition("@")
        async with self._lock:
            served, kept = self._own_row(tenant, name, f"{name}{at}{number}"), self._versions_of(tenant, name)
            rows = [served, *kept]
            if at:
                rows = [row for row in rows if str(row["version"]) == number]
                if not rows:
                    raise no_such_adapter(f"{name}@{number}")
                if rows == [served] and kept:
                    raise Conflict(
                        f"`{name}@{number}` is what `{name}` means now; pin another version first, or remove "
                        f"`{name}` with all of them.",
                        param="name",
                    )
            whole = len(rows) == len(kept) + 1
            gone = {f"{name}@{row['version']}" for row in rows} | ({name} if whole else set())
            self._check_aliases(tenant, gone)
            await to_thread.run_sync(self._delete, rows, (tenant, name) if whole else None)
            for row in rows:
                self.files.collect(row["digest"])

    def _commit(self, folder: Path, digest: str, change: "_Change") -> None:
        """Move the files first, then change the rows: after a crash in between, no row names them."""
        self.files.put(folder, digest)
        with self._data.write() as db:
            if change.kept is not None:
                db.execute(_KEEP, tuple(change.kept[column] for column in _COLUMNS))
            for each in change.dropped:
                db.execute("delete from adapter_versions where id = ?", (each["id"],))
            db.execute(_PUT if change.serves else _KEEP, change.row)
            db.execute(_SET, change.settings)
            for each in change.dropped:
                self.files.drop(db, each["digest"])
            self.files.put_again(digest)

    def _delete(self, rows: Sequence[TableRow], name: tuple[str, str] | None) -> None:
        """Delete versions, and with the last of them what belongs to their tenant's name."""
        ids, digests = [row["id"] for row in rows], {row["digest"] for row in rows}

        def change(db: Connection) -> None:
            for id in ids:
                db.execute("delete from adapters where id = ?", (id,))
                db.execute("delete from adapter_versions where id = ?", (id,))
            if name is not None:
                db.execute("delete from adapter_settings where tenant = ? and name = ?", name)
            for digest in digests:
                self.files.drop(db, digest)

        self._data.urgently(change)

    def _bind(self, key: str, shapes: str) -> None:
        """Check that the directory's adapters of a base were checked against these shapes, or that it has
        none yet."""
        name = f"shapes {key}".rstrip()
        known = self._data.rows("select value from meta where key = ?", (name,))
        others = known and known[0][0] != shapes.encode()
        if others and self._data.rows("select 1 from adapters where base = ? limit 1", (key,)):
            of = f" of `{key}`" if key else ""
            raise LoadError(
                f"--data-dir {self._data.path}: its adapters{of} are for a base of other shapes; "
                "use another directory for this model."
            )
        if not known or others:
            with self._data.write() as db:
                db.execute(_BIND, (name, shapes.encode()))


class _Change(NamedTuple):
    """What an upload changes: its `row`, which `serves` the name or is only kept; the row that it retires and
    that is `kept`; the versions that are dropped; and the name's settings."""

    row: tuple[object, ...]
    serves: bool
    kept: TableRow | None
    dropped: Sequence[TableRow]
    settings: tuple[object, ...]


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


def _bytes(rows: Iterable[TableRow]) -> int:
    return sum(int(row["bytes"]) for row in rows)
