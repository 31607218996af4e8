"""The adapters that are registered, as rows and as the API shows them.

The table `adapters` has the version of each name that serves it, `adapter_versions` the others that are kept,
and `adapter_settings` what belongs to the name: the newest number that was given, whether it is pinned,
and whether what it means stays on the device.
"""

import builtins
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from personae.actors.client import ModelCard
from personae.api.adapters.defaults import RequestDefaults, decode_defaults, encode_defaults
from personae.api.adapters.sources.url import parse_source, requested_name
from personae.api.database.base import TableRow
from personae.api.tenants.data import DataDir
from personae.errors import NotFound, RequestError
from personae.lora.bounds import AdapterBounds
from personae.lora.peft_names import targets

_MOST_DIGITS = 15


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


class AdapterTraits(msgspec.Struct, frozen=True):
    """The content of a row's column `traits`."""

    traits: tuple[str, ...] = ()
    invocation: tuple[int, ...] = ()


class NameSettings(NamedTuple):
    """What belongs to a name rather than to a version; `id` is that of its row."""

    id: str
    newest: int = 0
    pinned: bool = False
    keep_loaded: bool = False


class AdapterRecords:
    """Reads what is registered. `base` is the name of the first base; `bounds` are by what a row has as its
    base."""

    def __init__(self, data: DataDir, base: str) -> None:
        self._data = data
        self.base = base
        self._bounds: dict[str, AdapterBounds] = {}

    def _key(self, base: str | None) -> str:
        """What a row has as its base: nothing for the first, so that it may be renamed."""
        return "" if base is None or base == self.base else base

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

    def _settings(self, tenant: str, name: str) -> NameSettings:
        rows = self._data.rows("select * from adapter_settings where tenant = ? and name = ?", (tenant, name))
        if not rows:
            return NameSettings(f"settings-{secrets.token_hex(12)}")
        row = rows[0]
        return NameSettings(row["id"], row["newest"], bool(row["pinned"]), bool(row["keep_loaded"]))

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
        ranks = ranks_of(row)
        traits = msgspec.json.decode(row["traits"], type=AdapterTraits)
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


def ranks_of(row: TableRow) -> dict[str, int]:
    """The adapter's ranks, by module."""
    return msgspec.json.decode(row["ranks"], type=dict[str, int])


def no_such_adapter(name: str) -> NotFound:
    """The same error for another tenant's adapter as for one that does not exist."""
    return NotFound(f"There is no adapter `{name[:80]}`.", param="name", code="adapter_not_found")


def no_such_version(name: str, version: int, known: Iterable[int]) -> NotFound:
    """The error that names the versions that there are."""
    numbers = ", ".join(map(str, sorted(known)))
    return NotFound(
        f"There is no version {version} of `{name}`; there are {numbers}.",
        param="version",
        code="adapter_not_found",
    )
