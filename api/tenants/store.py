"""Tenants and their API keys.

A key is `psn_<id>_<secret>`: the id finds it, and the secret of 256 random bits proves it. SHA-256 of the
whole key is stored. A slow hash would protect secrets that can be guessed; these cannot.
"""

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from personae.api.database.base import Connection, TableRow
from personae.api.tenants.data import DataDir
from personae.errors import Conflict, NotFound, RequestError

Role = Literal["admin", "tenant"]

DEFAULT_TENANT = "default"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_KEY = re.compile(r"psn_([0-9a-f]{12})_[0-9a-f]{64}")
_NOBODY = bytes(32)
_LONGEST_LABEL = 100
_LATEST = 253_402_300_799  # Unix time: dates of later years cannot be written
_AT_ONCE = 500  # values of a query
_KEYS = "select id, tenant, role, created, revoked, label, expires, used from keys "
_OF_TENANTS = (
    "adapters",
    "adapter_versions",
    "adapter_settings",
    "adapter_aliases",
    "files",
    "batches",
    "responses",
    "conversations",
    "keys",
)
_LIVE_BATCHES = ("validating", "in_progress", "finalizing", "cancelling")


class TenantLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a tenant may use; None is the default (`DEFAULTS` here and in `limits.py`), or no limit.
    `bytes` are those of its adapters on the disk. `files` and `file_bytes` limit input files and results
    of batches, `batches` the unfinished ones, `schemas_per_minute` schemas and grammars that must be
    compiled, `body_bytes` request bodies that are arriving, `response_bytes` stored responses, of which
    the oldest are removed, `tokens_per_day` and `spend_per_day` tokens and money in a day (UTC),
    `fetches_per_minute` adapters that its requests have fetched by naming a source in `model`. `weight`
    is not a limit: with 2 a tenant gets twice the service of one without."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    adapters: int | None = None
    bytes: int | None = None
    file_bytes: int | None = None
    schemas_per_minute: int | None = None
    weight: float | None = None
    body_bytes: int | None = None
    files: int | None = None
    batches: int | None = None
    response_bytes: int | None = None
    tokens_per_day: int | None = None
    spend_per_day: float | None = None
    fetches_per_minute: int | None = None

    def or_else(self, others: "TenantLimits") -> "TenantLimits":
        """These limits, with the others' where they have none."""
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return msgspec.structs.replace(others, **given)


DEFAULTS = TenantLimits(
    adapters=256,
    bytes=8 * 2**30,
    schemas_per_minute=600,
    files=10_000,
    file_bytes=8 * 2**30,
)
"""Limits of a tenant that has none of its own. They do not apply to admins' keys, because an admin is
responsible for the machine. For batches the server has a separate limit (`ApiSettings.max_open_batches`)."""


_Count = Annotated[int, Meta(ge=0, le=2**53)] | UnsetType | None
_Money = Annotated[float, Meta(ge=0, le=1e12)] | UnsetType | None
_Weight = Annotated[float, Meta(ge=0.01, le=100)] | UnsetType | None


class LimitChanges(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Limits of a tenant. null means the default, and an absent field does not change."""

    requests_per_minute: _Count = UNSET
    tokens_per_minute: _Count = UNSET
    concurrent: _Count = UNSET
    adapters: _Count = UNSET
    bytes: _Count = UNSET
    file_bytes: _Count = UNSET
    schemas_per_minute: _Count = UNSET
    weight: _Weight = UNSET
    body_bytes: _Count = UNSET
    files: _Count = UNSET
    batches: _Count = UNSET
    response_bytes: _Count = UNSET
    tokens_per_day: _Count = UNSET
    spend_per_day: _Money = UNSET
    fetches_per_minute: _Count = UNSET

    def named(self) -> dict[str, Any]:
        """The limits that are present."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not UNSET}


class Tenant(msgspec.Struct, frozen=True):
    """A tenant; `created` and `revoked` are Unix times in seconds."""

    name: str
    created: int
    revoked: int | None
    limits: TenantLimits
    object: str = "tenant"


class ImportedTenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a file of tenants."""

    name: str
    limits: LimitChanges = msgspec.field(default_factory=LimitChanges)


class ApiKey(msgspec.Struct, frozen=True):
    """A key without its secret. Times are Unix seconds; `used` is when it was last used, to within a
    minute."""

    id: str
    tenant: str
    role: Role
    created: int
    revoked: int | None
    label: str = ""
    expires: int | None = None
    used: int | None = None
    object: str = "key"


class Identity(msgspec.Struct, frozen=True):
    """The owner of a valid key. `key` is None if no key is required. `since` is when the tenant was created:
    a tenant with a freed name is a different one."""

    tenant: str
    role: Role
    limits: TenantLimits = TenantLimits()
    key: str | None = None
    since: int = 0


class TenantStore:
    """The tenants and keys of a data directory. `key` is one more admin's key, in any form, and is not
    stored."""

    def __init__(self, data: DataDir, key: str | None = None) -> None:
        self._data = data
        self._own = None if key is None else _hash(key)

    @property
    def has_admin(self) -> bool:
        """Whether an admin's key is valid."""
        return self._own is not None or bool(
            self._data.rows(
                "select 1 from keys join tenants on tenants.name = keys.tenant where keys.role = 'admin' "
                "and keys.revoked is null and (keys.expires is null or keys.expires > ?) "
                "and tenants.revoked is null limit 1",
                (int(time.time()),),
            )
        )

    def create_tenant(self, name: str, limits: TenantLimits) -> None:
        """Add a tenant. Raises RequestError for a bad name or limit, Conflict for a name that is taken.

        A revoked tenant's name stays taken until it is freed.
        """
        self.create_many([(name, limits)])

    def create_many(self, tenants: Sequence[tuple[str, TenantLimits]], *, keys: bool = False) -> list[str]:
        """Add all tenants or none; with `keys` also one key for each, in order. Raises as `create_tenant`."""
        for name, limits in tenants:
            _check_name(name)
            _check_limits(limits)
        now, made = int(time.time()), [_new_key() for _ in tenants if keys]
        rows = [(name, now, msgspec.json.encode(limits).decode()) for name, limits in tenants]
        with self._data.write() as db:
            for row in rows:
                added = db.execute("insert into tenants values (?, ?, null, ?) on conflict do nothing", row)
                if not added.rowcount:
                    raise Conflict(f"There is or was a tenant {row[0]!r}.", param="name")
            for (name, *_), key in zip(rows, made, strict=False):
                _insert_key(db, key, name, "tenant")
        return made

    def list_tenants(self) -> list[Tenant]:
        """All tenants, by name."""
        return [_tenant(row) for row in self._data.rows("select * from tenants order by name")]

    def find_tenant(self, name: str) -> Tenant:
        """A tenant. Raises NotFound."""
        rows = self._data.rows("select * from tenants where name = ?", (name,))
        if not rows:
            raise _no_tenant(name)
        return _tenant(rows[0])

    def change_limits(self, name: str, limits: TenantLimits) -> None:
        """Set the limits that are given; the others stay. Raises NotFound if there is no such tenant."""
        given = {field: value for field, value in msgspec.structs.asdict(limits).items() if value is not None}
        self.set_limits(name, given)

    def set_limits(self, name: str, changes: Mapping[str, float | None]) -> Tenant:
        """Set the limits that are present; None sets the default. Raises NotFound if the tenant does not
        exist, RequestError for an invalid limit."""
        with self._data.write() as db:
            row = db.execute("select * from tenants where name = ? and revoked is null", (name,)).fetchone()
            if row is None:
                raise _no_tenant(name)
            changed = msgspec.structs.replace(_limits(row), **changes)
            _check_limits(changed)
            text = msgspec.json.encode(changed).decode()
            db.execute("update tenants set limits = ? where name = ?", (text, name))
            return msgspec.structs.replace(_tenant(row), limits=changed)

    def revoke_tenant(self, name: str) -> None:
        """Revoke all of the tenant's keys at once. Raises NotFound if the tenant does not exist."""
        self._revoke("tenants", "name", name)

    def free_tenant(self, name: str) -> None:
        """Remove a revoked tenant with all its data, so that another may have its name. Its usage is kept,
        under the name and the time. Raises NotFound if the tenant does not exist, Conflict if it has not been
        revoked or has an unfinished batch."""

        def change(db: Connection) -> None:
            row = db.execute("select revoked from tenants where name = ?", (name,)).fetchone()
            if row is None:
                raise _no_tenant(name)
            if row["revoked"] is None:
                raise Conflict(f"The tenant {name!r} has not been revoked.", param="name")
            marks = ", ".join("?" * len(_LIVE_BATCHES))
            if db.execute(
                f"select 1 from batches where tenant = ? and status in ({marks})",  # noqa: S608  question marks
                (name, *_LIVE_BATCHES),
            ).fetchone():
                raise Conflict(f"A batch of {name!r} is not done yet; try again later.", param="name")
            for table in _OF_TENANTS:
                db.execute(f"delete from {table} where tenant = ?", (name,))  # noqa: S608  our own words
            past = f"{name}~{int(time.time())}"
            db.execute("update usage set tenant = ? where tenant = ?", (past, name))
            db.execute("delete from tenants where name = ?", (name,))

        self._data.urgently(change)

    def create_key(self, tenant: str, role: Role, *, label: str = "", expires: int | None = None) -> str:
        """A new key, which is returned only this once. Raises NotFound if the tenant does not exist,
        RequestError for a label that is too long or a time in the past."""
        _check_key(label, expires)
        key = _new_key()
        with self._data.write() as db:
            if not db.execute(
                "select 1 from tenants where name = ? and revoked is null", (tenant,)
            ).fetchone():
                raise NotFound(
                    f"There is no tenant {tenant[:80]!r}: `personae tenants create` makes one.",
                    param="tenant",
                )
            _insert_key(db, key, tenant, role, label, expires)
        return key

    def list_keys(self, tenant: str | None = None) -> list[ApiKey]:
        """All keys, or those of one tenant; by tenant."""
        rows = self._data.rows(
            _KEYS + "where ? is null or tenant = ? order by tenant, created, rowid", (tenant, tenant)
        )
        return [ApiKey(*row) for row in rows]

    def find_key(self, id: str) -> ApiKey:
        """A key, by its id or the whole key. Raises NotFound."""
        rows = self._data.rows(_KEYS + "where id = ?", (key_id(id),))
        if not rows:
            raise NotFound(f"There is no such key: {id[:80]!r}.", param="id")
        return ApiKey(*rows[0])

    def change_key(self, id: str, changes: Mapping[str, Any]) -> ApiKey:
        """Set a key's `label` or `expires`, if present. Raises NotFound, or RequestError."""
        key = msgspec.structs.replace(self.find_key(id), **changes)
        _check_key(key.label, changes.get("expires"))
        with self._data.write() as db:
            db.execute(
                "update keys set label = ?, expires = ? where id = ?", (key.label, key.expires, key.id)
            )
        return key

    def rotate_key(self, id: str, overlap: int = 0) -> str:
        """A new key like an old one, which stays valid for `overlap` more seconds. Raises NotFound if there
        is no such valid key."""
        old, now = self.find_key(id), int(time.time())
        if old.revoked is not None or (old.expires is not None and old.expires <= now):
            raise NotFound(f"The key {old.id} is not valid any more.", param="id")
        key, end = _new_key(), now + overlap
        until = end if old.expires is None else min(old.expires, end)
        with self._data.write() as db:
            _insert_key(db, key, old.tenant, old.role, old.label, old.expires)
            if overlap:
                db.execute("update keys set expires = ? where id = ?", (until, old.id))
            else:
                db.execute("update keys set revoked = ? where id = ?", (now, old.id))
        return key

    def revoke_key(self, id: str) -> None:
        """Revoke the key at once. `id` may be the whole key. Raises NotFound if it does not exist."""
        self._revoke("keys", "id", key_id(id))

    def on_behalf_of(self, tenant: str) -> Identity | None:
        """The identity for a tenant's work without a request. None for an unknown or revoked tenant."""
        rows = self._data.rows(
            "select created, revoked, limits, exists (select 1 from keys where keys.tenant = name "
            "and role = 'admin' and keys.revoked is null) as admin from tenants where name = ?",
            (tenant,),
        )
        if not rows:
            return Identity(tenant, "tenant") if tenant == DEFAULT_TENANT else None
        if rows[0]["revoked"]:
            return None
        limits = _limits_of(rows[0], "admin" if rows[0]["admin"] else "tenant")
        return Identity(tenant, "tenant", limits, since=rows[0]["created"])

    def valid_keys(self, ids: Sequence[str]) -> set[str]:
        """Those of the keys that were not revoked, nor their tenants. A key that has expired is one of them:
        what it began may end."""
        valid: set[str] = set()
        for start in range(0, len(ids), _AT_ONCE):
            some = ids[start : start + _AT_ONCE]
            marks = ", ".join("?" * len(some))
            rows = self._data.rows(
                "select keys.id from keys join tenants on tenants.name = keys.tenant "  # noqa: S608  question marks
                f"where keys.id in ({marks}) and keys.revoked is null and tenants.revoked is null",
                some,
            )
            valid.update(row["id"] for row in rows)
        return valid

    def has_keys(self) -> bool:
        """Whether there was ever a key: every request then needs one."""
        return self._own is not None or bool(self._data.rows("select 1 from keys limit 1"))

    def identify(self, key: str) -> Identity | None:
        """The owner of a key. None if the key is not valid. Takes the same time for every wrong secret."""
        if self._own is not None and hmac.compare_digest(self._own, _hash(key)):
            return Identity(DEFAULT_TENANT, "admin")
        match = _KEY.fullmatch(key)
        rows = self._data.rows(
            "select keys.*, tenants.limits, tenants.created as since from keys "
            "join tenants on tenants.name = keys.tenant where keys.id = ? and keys.revoked is null "
            "and (keys.expires is null or keys.expires > ?) and tenants.revoked is null",
            (match[1] if match else "", int(time.time())),
        )
        right = hmac.compare_digest(rows[0]["digest"] if rows else _NOBODY, _hash(key))
        if not rows or not right:
            return None
        row, role = rows[0], rows[0]["role"]
        return Identity(row["tenant"], role, _limits_of(row, role), row["id"], row["since"])

    def _revoke(self, table: str, column: str, value: str) -> None:
        def change(db: Connection) -> None:
            done = db.execute(
                f"update {table} set revoked = coalesce(revoked, ?) where {column} = ?",  # noqa: S608  our own words
                (int(time.time()), value),
            )
            if not done.rowcount:
                raise NotFound(f"There is no such {table[:-1]}: {value[:80]!r}.", param=column)

        self._data.urgently(change)


def key_id(key: str) -> str:
    """The id of a key, given as the id or the whole key."""
    match = _KEY.fullmatch(key)
    return match[1] if match else key


def _new_key() -> str:
    return f"psn_{secrets.token_hex(6)}_{secrets.token_hex(32)}"


def _insert_key(
    db: Connection, key: str, tenant: str, role: Role, label: str = "", expires: int | None = None
) -> None:
    db.execute(
        "insert into keys (id, tenant, role, created, label, expires, digest) values (?, ?, ?, ?, ?, ?, ?)",
        (key_id(key), tenant, role, int(time.time()), label, expires, _hash(key)),
    )


def _check_name(name: str) -> None:
    if _NAME.fullmatch(name) is None:
        raise RequestError(
            f"{name[:80]!r} is no tenant's name: 1 to 63 of a-z, 0-9, - and _, a letter or digit first.",
            param="name",
        )


def _check_limits(limits: TenantLimits) -> None:
    for field, value in msgspec.structs.asdict(limits).items():
        if value is not None and value < 0:
            raise RequestError(f"`{field}` must not be negative.", param=field)
    if limits.weight is not None and not 0.01 <= limits.weight <= 100:
        raise RequestError("`weight` must be from 0.01 to 100.", param="weight")


def _check_key(label: str, expires: int | None) -> None:
    if len(label) > _LONGEST_LABEL:
        raise RequestError(f"`label` may have at most {_LONGEST_LABEL} characters.", param="label")
    if expires is not None and expires <= time.time():
        raise RequestError("`expires` is past; it is a Unix time in seconds.", param="expires")
    if expires is not None and expires > _LATEST:
        latest = f"`expires` must be at most {_LATEST}, the end of the year 9999"
        raise RequestError(f"{latest}; it is a Unix time in seconds.", param="expires", code="out_of_range")


def _no_tenant(name: str) -> NotFound:
    return NotFound(f"There is no tenant {name[:80]!r}.", param="name", code="tenant_not_found")


def _tenant(row: TableRow) -> Tenant:
    return Tenant(row["name"], row["created"], row["revoked"], _limits(row))


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _limits_of(row: TableRow, role: Role) -> TenantLimits:
    """A tenant's limits for a key of that role."""
    return _limits(row) if role == "admin" else _limits(row).or_else(DEFAULTS)


def _limits(row: TableRow) -> TenantLimits:
    return msgspec.json.decode(row["limits"], type=TenantLimits)
