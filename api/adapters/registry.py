"""Which tenant has which adapters, and the files of each.

An adapter's files are in a folder named after its digest, so replacing an adapter touches nothing that
another request, tenant or version uses. A folder stays as long as a row names it or a request holds it. A
folder that a crash left without either is deleted at the next start.

The table `adapters` has the version of each name that serves it, `adapter_versions` the others that are kept,
and `adapter_settings` what belongs to the name: the newest number that was given, whether it is pinned,
and whether what it means stays on the device.

Everything here belongs to the event loop, except what it passes to threads itself.
"""

import builtins
import os
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from pathlib import Path
from typing import NamedTuple

import msgspec
from anyio import Lock, to_thread
from msgspec import UNSET, UnsetType

from personae.actors.client import ModelCard
from personae.api.adapters.aliases import Aliases
from personae.api.adapters.checker import AdapterChecker, ThreadChecker
from personae.api.adapters.defaults import RequestDefaults, decode_defaults, encode_defaults
from personae.api.adapters.sources.url import parse_source, requested_name
from personae.api.database.base import Connection, TableRow
from personae.api.http.upload import Staging, sync_folder
from personae.api.tenants.data import DataDir
from personae.api.tenants.store import Identity
from personae.errors import (
    AdapterError,
    Conflict,
    LoadError,
    NotFound,
    QuotaExceeded,
    RequestError,
    StorageFailed,
)
from personae.kernels.sizes import size_text
from personae.lora.bounds import AdapterBounds
from personae.lora.disk import bytes_in
from personae.lora.peft_names import CONFIG_FILE, TENSORS_FILE, targets

STAGING = "staging"
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
_NAMED = (
    "select 1 from adapters where digest = ? union all "
    "select 1 from adapter_versions where digest = ? limit 1"
)
_SET = (
    "insert into adapter_settings (tenant, name, id, newest, pinned, keep_loaded) values (?, ?, ?, ?, ?, ?) "
    "on conflict (tenant, name) do update set newest = excluded.newest, pinned = excluded.pinned, "
    "keep_loaded = excluded.keep_loaded"
)
KEPT_VERSIONS = 5
"""How many versions of a name are kept besides the one that serves it."""
_MOST_DIGITS = 15
_BIND = "insert into meta values (?, ?) on conflict (key) do update set value = excluded.value"


class AdapterRecord(msgspec.Struct, frozen=True):
    """A registered adapter, as the API shows it. `bytes` are those on the disk. `traits` name what it has in
    addition to low rank on linear modules, `invocation` has its activating tokens (aLoRA). `versions` are all
    that are kept, and `version` is this one; with `pinned`, the name stays with the version that it has.
    With `keep_loaded`, what the name means stays on the device. `source` is where it was fetched from.
    `defaults`, which lists leave out, are for requests that name the version. Admins who list other tenants'
    adapters see the `tenant`."""

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
    versions: tuple[int, ...] = ()
    pinned: bool = False
    keep_loaded: bool = False
    source: str | None = None
    defaults: RequestDefaults | UnsetType = UNSET
    tenant: str | UnsetType = UNSET
    object: str = "adapter"

    @property
    def exact(self) -> str:
        """The name that always means this version."""
        return f"{self.name}@{self.version}"

    def card(self, name: str | None = None) -> ModelCard:
        """The adapter as a model that requests may name, by its name or by the `name` that was asked for."""
        return ModelCard(
            name or self.name,
            self.sha256,
            self.created,
            self.base_model,
            max(self.ranks.values(), default=0),
            self.traits,
            self.invocation,
            version=self.exact,
            defaults=encode_defaults(self.defaults or RequestDefaults()),
        )


class _Traits(msgspec.Struct, frozen=True):
    """The content of a row's column `traits`."""

    traits: tuple[str, ...] = ()
    invocation: tuple[int, ...] = ()


class _Settings(NamedTuple):
    """What belongs to a name rather than to a version; `id` is that of its row."""

    id: str
    newest: int = 0
    pinned: bool = False
    keep_loaded: bool = False


class Registry:
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
        self._data = data
        self.base = base
        self._reserved = set(reserved)
        self._bounds: dict[str, AdapterBounds] = {}  # by what a row has as its base
        self._kept_versions = kept_versions
        self._held: Counter[str] = Counter()
        self.aliases = Aliases(data)
        self._lock = Lock()
        self._requested: dict[tuple[str, str], tuple[Lock, int]] = {}
        self._bringing = Lock()  # one adapter is brought at a time
        self.travels = data.shared  # whether the files of an adapter may be elsewhere
        self._checker = ThreadChecker() if checker is None else checker
        self._learn("", bounds)
        self._staging = Staging(data.adapters / STAGING)
        for folder in data.adapters.iterdir():
            if folder.name != STAGING:
                self._collect(folder.name)
        self._recount()

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

    def _key(self, base: str | None) -> str:
        """What a row has as its base: nothing for the first, so that it may be renamed."""
        return "" if base is None or base == self.base else base

    def close(self) -> None:
        """Wait until all deletions are done."""
        self._checker.close()
        self._staging.close()

    def find(self, tenant: str, name: str) -> AdapterRecord | None:
        """The tenant's adapter of that name, else one that is shared. `name@N` is its version N. If a request
        had it fetched, its source is a name of it, too."""
        if "://" in name:
            with suppress(RequestError):
                return self.find(tenant, requested_name(parse_source(name)))
            return None
        name, at, number = name.partition("@")
        rows = self._data.rows(
            "select * from adapters where name = ? and (tenant = ? or shared) "
            "order by tenant <> ?, created, tenant limit 1",
            (name, tenant, tenant),
        )
        if not rows:
            return None
        if at and number != str(rows[0]["version"]):
            if not number.isascii() or not number.isdigit() or len(number) > _MOST_DIGITS or number[0] == "0":
                return None
            rows = self._data.rows(
                "select * from adapter_versions where tenant = ? and name = ? and version = ? "
                "and (tenant = ? or shared)",
                (rows[0]["tenant"], name, int(number), tenant),
            )
        return self._records(rows, tenant)[0] if rows else None

    def versions(self, tenant: str, name: str) -> builtins.list[AdapterRecord]:
        """Every kept version of the adapter that `find` finds, that the tenant may use, the newest first."""
        served = self.find(tenant, name)
        return [] if served is None else self._each_version(tenant, served)

    def _each_version(self, tenant: str, served: AdapterRecord) -> builtins.list[AdapterRecord]:
        exact = [self.find(tenant, f"{served.name}@{number}") for number in sorted(served.versions)[::-1]]
        return [record for record in exact if record is not None]

    def names_of(self, digest: str) -> set[str]:
        """The names under which tenants know an adapter."""
        rows = self._data.rows("select distinct name from adapters where digest = ?", (digest,))
        if rows:
            return {row["name"] for row in rows}
        rows = self._data.rows(
            "select distinct name, version from adapter_versions where digest = ?", (digest,)
        )
        return {f"{row['name']}@{row['version']}" for row in rows}

    def list(self, tenant: str) -> builtins.list[AdapterRecord]:
        """All adapters that `find` would find, by name."""
        rows = self._data.rows(
            "select * from adapters where tenant = ? or shared order by name, tenant <> ?, created, tenant",
            (tenant, tenant),
        )
        found: dict[str, TableRow] = {}
        for row in rows:
            found.setdefault(row["name"], row)
        return self._records(builtins.list(found.values()), tenant)

    def own(self, tenant: str | None) -> tuple[AdapterRecord, ...]:
        """A tenant's own adapters, or those of all tenants, each with its tenant."""
        rows = self._data.rows(
            "select * from adapters where ? is null or tenant = ? order by tenant, name", (tenant, tenant)
        )
        records = zip(self._records(rows, None), rows, strict=True)
        return tuple(msgspec.structs.replace(record, tenant=row["tenant"]) for record, row in records)

    def count(self) -> int:
        """The number of all tenants' adapters."""
        (count,) = self._data.rows("select count(*) from adapters")[0]
        return int(count)

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
                msgspec.json.encode(_Traits(read.traits, read.invocation)).decode(),
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
            with self.hold(digest):
                await to_thread.run_sync(self._commit, folder, digest, change)
            for each in dropped:
                self._collect(each["digest"])
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

    def _dropped(
        self, who: Identity, name: str, size: int, retired: TableRow | None
    ) -> builtins.list[TableRow]:
        """The versions that go when one of `size` bytes is added to a name and `retired` no longer serves it:
        those of the name that are too many, then the oldest of all names until the rest fits. Those that an
        alias names stay. Raises QuotaExceeded."""
        kept = builtins.list(
            self._data.rows("select * from adapter_versions where tenant = ?", (who.tenant,))
        )
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

    def _settings(self, tenant: str, name: str) -> _Settings:
        rows = self._data.rows("select * from adapter_settings where tenant = ? and name = ?", (tenant, name))
        if not rows:
            return _Settings(f"settings-{secrets.token_hex(12)}")
        row = rows[0]
        return _Settings(row["id"], row["newest"], bool(row["pinned"]), bool(row["keep_loaded"]))

    async def pin(self, tenant: str, name: str, version: int | None) -> AdapterRecord:
        """Have the name mean this version from now on, whatever is uploaded later; None: the newest again.
        Raises NotFound."""
        async with self._lock:
            served, settings = self._own_row(tenant, name), self._settings(tenant, name)
            kept = {row["version"]: row for row in self._versions_of(tenant, name)}
            wanted = max([*kept, served["version"]]) if version is None else version
            if wanted != served["version"] and wanted not in kept:
                raise _no_such_version(name, wanted, [*kept, served["version"]])
            newest = max(settings.newest, served["version"])
            row = (tenant, name, settings.id, newest, int(version is not None), int(settings.keep_loaded))
            if settings.keep_loaded and wanted != served["version"]:
                self._check_kept_loaded(served["base"], (tenant, name), _ranks(kept[wanted]))

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
                self._check_kept_loaded(served["base"], (tenant, name), _ranks(served))
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
            bounds.check_kept_loaded([*map(_ranks, others), ranks])
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

    def own_version(self, tenant: str, name: str) -> AdapterRecord:
        """The tenant's own adapter of that name, or its version `name@N`. Raises NotFound."""
        return self._records([self._own_version(tenant, name)], tenant)[0]

    def _own_version(self, tenant: str, name: str) -> TableRow:
        plain, at, number = name.partition("@")
        served = self._own_row(tenant, plain, name)
        rows = [served, *self._versions_of(tenant, plain)] if at else [served]
        found = [row for row in rows if not at or str(row["version"]) == number]
        if not found:
            raise no_such_adapter(name)
        return found[0]

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
                self._collect(row["digest"])

    def _own_row(self, tenant: str, name: str, asked: str | None = None) -> TableRow:
        """The tenant's own row that serves the name. Raises NotFound."""
        rows = self._data.rows("select * from adapters where tenant = ? and name = ?", (tenant, name))
        if not rows:
            raise no_such_adapter(asked or name)
        return rows[0]

    def _versions_of(self, tenant: str, name: str) -> builtins.list[TableRow]:
        return builtins.list(
            self._data.rows("select * from adapter_versions where tenant = ? and name = ?", (tenant, name))
        )

    def _commit(self, folder: Path, digest: str, change: "_Change") -> None:
        """Move the files first, then change the rows: after a crash in between, no row names them."""
        target = self._data.adapters / digest
        if not target.exists():
            os.rename(folder, target)
            sync_folder(self._data.adapters)
        objects, name = self._data.objects, object_name(digest)
        files = {each: target / each for each in (CONFIG_FILE, TENSORS_FILE)}
        if objects is not None:
            objects.put(name, files)
        with self._data.write() as db:
            if change.kept is not None:
                db.execute(_KEEP, tuple(change.kept[column] for column in _COLUMNS))
            for each in change.dropped:
                db.execute("delete from adapter_versions where id = ?", (each["id"],))
            db.execute(_PUT if change.serves else _KEEP, change.row)
            db.execute(_SET, change.settings)
            for each in change.dropped:
                self._drop_object(db, each["digest"])
            if objects is not None and not objects.has(name):
                objects.put(name, files)  # another server removed the last adapter of this digest meanwhile

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
                self._drop_object(db, digest)

        self._data.urgently(change)

    def _drop_object(self, db: Connection, digest: str) -> None:
        """Remove an adapter's files from the object store if nothing names them."""
        objects = self._data.objects
        if objects is not None and not db.execute(_NAMED, (digest, digest)).fetchone():
            with suppress(StorageFailed):  # it only takes room
                objects.delete(object_name(digest))

    def _collect(self, digest: str) -> None:
        """Delete an adapter's files if nothing needs them any more."""
        if digest in self._held or self._data.rows(_NAMED, (digest, digest)):
            return
        self._staging.discard(self._data.adapters / digest)  # none, if it is the server's own

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

    def _records(self, rows: Sequence[TableRow], tenant: str | None) -> builtins.list[AdapterRecord]:
        """The records of these rows. `tenant` sees its own versions and shared ones; None: all."""
        values: tuple[object, ...] = ()
        where = ""
        if len(rows) == 1:
            where, values = " where tenant = ? and name = ?", (rows[0]["tenant"], rows[0]["name"])
        settings = {
            (row["tenant"], row["name"]): row
            for row in self._data.rows(f"select * from adapter_settings{where}", values)  # noqa: S608  our own words
        }
        others: dict[tuple[str, str], builtins.list[int]] = {}
        for table in ("adapters", "adapter_versions"):
            query = f"select tenant, name, version, shared from {table}{where}"  # noqa: S608  our own words
            for row in self._data.rows(query, values):
                if tenant in (None, row["tenant"]) or row["shared"]:
                    others.setdefault((row["tenant"], row["name"]), []).append(row["version"])
        return [
            self._record(row, sorted(others.get(key, ())), settings.get(key))
            for row, key in ((row, (row["tenant"], row["name"])) for row in rows)
        ]

    def _record(self, row: TableRow, versions: Sequence[int], settings: TableRow | None) -> AdapterRecord:
        ranks = _ranks(row)
        traits = msgspec.json.decode(row["traits"], type=_Traits)
        return AdapterRecord(
            id=row["id"],
            name=row["name"],
            version=row["version"],
            sha256=row["digest"],
            ranks=ranks,
            targets=self._targets(row["base"], ranks),
            bytes=row["bytes"],
            created=row["created"],
            base_model=row["base"] or self.base,
            shared=bool(row["shared"]),
            traits=traits.traits,
            invocation=traits.invocation,
            versions=tuple(versions),
            pinned=settings is not None and bool(settings["pinned"]),
            keep_loaded=settings is not None and bool(settings["keep_loaded"]),
            source=row["source"] or None,
            defaults=decode_defaults(row["defaults"]),
        )

    def _targets(self, key: str, ranks: dict[str, int]) -> builtins.list[str]:
        """The names of an adapter's modules: PEFT's, or ours as long as its base has not been loaded."""
        bounds = self._bounds.get(key)
        return sorted(ranks) if bounds is None else targets(ranks, bounds.shapes)


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


def _ranks(row: TableRow) -> dict[str, int]:
    return msgspec.json.decode(row["ranks"], type=dict[str, int])


def _bytes(rows: Iterable[TableRow]) -> int:
    return sum(int(row["bytes"]) for row in rows)


def object_name(digest: str) -> str:
    """The name of an adapter's files in an object store."""
    return f"adapters/{digest}"


def no_such_adapter(name: str) -> NotFound:
    """The same error for another tenant's adapter as for one that does not exist."""
    return NotFound(f"There is no adapter `{name[:80]}`.", param="name", code="adapter_not_found")


def _no_such_version(name: str, version: int, known: Iterable[int]) -> NotFound:
    numbers = ", ".join(map(str, sorted(known)))
    return NotFound(
        f"There is no version {version} of `{name}`; there are {numbers}.",
        param="version",
        code="adapter_not_found",
    )
