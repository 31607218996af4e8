"""Aliases: names that stand for several models, each with its part of the requests."""

import hashlib
import math
import random
import secrets
import time

import msgspec
from msgspec import UNSET, UnsetType

from personae.api.database.base import TableRow
from personae.api.tenants.data import DataDir
from personae.errors import NotFound, QuotaExceeded, RequestError

MAX_TARGETS = 16
MAX_ALIASES = 256
MAX_WEIGHT = 1e6
_PUT = (
    "insert into adapter_aliases (tenant, name, id, targets, shared, created) values (?, ?, ?, ?, ?, ?) "
    "on conflict (tenant, name) do update set targets = excluded.targets, shared = excluded.shared"
)
_FIND = (
    "select * from adapter_aliases as alias where name = ? and (tenant = ? or (shared and not exists "
    "(select 1 from adapters where adapters.tenant = ? and adapters.name = alias.name))) "
    "order by tenant <> ?, created, tenant limit 1"
)


class AliasRecord(msgspec.Struct, frozen=True):
    """An alias, as the API shows it: each model has its weight's part of the requests. Admins who list other
    tenants' aliases see the `tenant`."""

    name: str
    targets: dict[str, float]
    created: int
    shared: bool
    tenant: str | UnsetType = UNSET
    object: str = "adapter_alias"

    def choose(self, key: str | None) -> str:
        """The model for a request. The same `key` gets the same one as long as the weights stay, and a change
        of weights moves no more keys than it must. Without a key it is drawn."""
        share = random.random() if key is None else _place(self.name, key)  # noqa: S311  no secret
        left = share * sum(self.targets.values())
        for target, weight in self.targets.items():
            left -= weight
            if left < 0:
                return target
        return next(target for target in reversed(self.targets) if self.targets[target])


def _place(name: str, key: str) -> float:
    digest = hashlib.sha256(f"{name}\0{key}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6]) / 2**48


class Aliases:
    """The aliases of a data directory."""

    def __init__(self, data: DataDir) -> None:
        self._data = data

    def find(self, tenant: str, name: str) -> AliasRecord | None:
        """The tenant's alias of that name, else a shared one unless the tenant has an adapter of that
        name."""
        rows = self._data.rows(_FIND, (name, tenant, tenant, tenant))
        return _record(rows[0]) if rows else None

    def list(self, tenant: str) -> list[AliasRecord]:
        """All aliases that the tenant may use, by name."""
        rows = self._data.rows(
            "select * from adapter_aliases where tenant = ? or shared "
            "order by name, tenant <> ?, created, tenant",
            (tenant, tenant),
        )
        found: dict[str, AliasRecord] = {}
        for row in rows:
            found.setdefault(row["name"], _record(row))
        return [*found.values()]

    def put(self, tenant: str, name: str, targets: dict[str, float], *, shared: bool) -> AliasRecord:
        """Make the alias, or change it. Blocking. Raises QuotaExceeded."""
        check_targets(targets)
        with self._data.write() as db:
            query = "select count(*) as number from adapter_aliases where tenant = ? and name <> ?"
            found = db.execute(query, (tenant, name)).fetchone()
            if found is not None and found["number"] >= MAX_ALIASES:
                raise QuotaExceeded(f"This tenant has {MAX_ALIASES} aliases, which is the limit.")
            values = msgspec.json.encode(targets).decode()
            id, now = f"alias-{secrets.token_hex(12)}", int(time.time())
            db.execute(_PUT, (tenant, name, id, values, shared, now))
            (row,) = db.execute(
                "select * from adapter_aliases where tenant = ? and name = ?", (tenant, name)
            ).fetchall()
        return _record(row)

    def remove(self, tenant: str, name: str) -> None:
        """Remove the tenant's own alias. Blocking. Raises NotFound."""
        if not self._data.rows("select 1 from adapter_aliases where tenant = ? and name = ?", (tenant, name)):
            raise no_such_alias(name)
        self._data.urgently(
            lambda db: db.execute("delete from adapter_aliases where tenant = ? and name = ?", (tenant, name))
        )

    def targets(self, tenant: str) -> set[str]:
        """Every model that an alias of the tenant names."""
        rows = self._data.rows("select * from adapter_aliases where tenant = ?", (tenant,))
        return {target for row in rows for target in _record(row).targets}


def check_targets(targets: dict[str, float]) -> None:
    """Raises RequestError unless these can be the targets of an alias."""
    if not 0 < len(targets) <= MAX_TARGETS:
        raise RequestError(f"`targets` must name 1 to {MAX_TARGETS} models.", param="targets")
    for name, weight in targets.items():
        if not math.isfinite(weight) or not 0 <= weight <= MAX_WEIGHT:
            raise RequestError(
                f"The weight of `{name[:80]}` must be from 0 to {MAX_WEIGHT:g}.",
                param="targets",
                code="out_of_range",
            )
    if not any(targets.values()):
        raise RequestError("One of the weights in `targets` must be over 0.", param="targets")


def no_such_alias(name: str) -> NotFound:
    """The same error for another tenant's alias as for one that does not exist."""
    return NotFound(f"There is no alias `{name[:80]}`.", param="name", code="alias_not_found")


def _record(row: TableRow) -> AliasRecord:
    targets = msgspec.json.decode(row["targets"], type=dict[str, float])
    return AliasRecord(row["name"], targets, row["created"], bool(row["shared"]))
