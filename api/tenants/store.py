"""Tenants and their API keys.

A key is `psn_<id>_<secret>`: the id finds it, the secret of 256 random bits proves it. What is stored is
SHA-256 of the whole key. A slow hash would protect secrets that can be guessed; this one cannot.
"""

import hashlib
import hmac
import re
import secrets
import sqlite3
import time
from typing import Literal

import msgspec

from personae.api.tenants.data import DataDir
from personae.errors import RequestError

Role = Literal["admin", "tenant"]

DEFAULT_TENANT = "default"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_KEY = re.compile(r"psn_([0-9a-f]{12})_[0-9a-f]{64}")
_NOBODY = bytes(32)


class TenantLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a tenant may use; None is the default (`DEFAULTS` here and in `limits.py`), or no limit.
    `bytes` are those that its adapters take on the disk; `files` and `file_bytes` are files for batches
    and of batches, `batches` those that are not done, `schemas_per_minute` schemas and grammars that have to
    be compiled, `body_bytes` those of request bodies that are being received. `weight` is no limit: with 2 it
    gets twice the service of a tenant without."""

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

    def or_else(self, others: "TenantLimits") -> "TenantLimits":
        """These, and where they say nothing the others."""
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return msgspec.structs.replace(others, **given)


DEFAULTS = TenantLimits(
    adapters=256,
    bytes=8 * 2**30,
    schemas_per_minute=600,
    files=10_000,
    file_bytes=8 * 2**30,
)
"""Limits of a tenant for which nothing else was said. Admins' keys have those alone that were given: an admin
answers for the machine. For batches the server has a limit of its own (`ApiSettings.max_open_batches`)."""


class Tenant(msgspec.Struct, frozen=True):
    """A tenant; `created` and `revoked` are Unix times in seconds."""

    name: str
    created: int
    revoked: int | None
    limits: TenantLimits


class ApiKey(msgspec.Struct, frozen=True):
    """A key without its secret."""

    id: str
    tenant: str
    role: Role
    created: int
    revoked: int | None


class Identity(msgspec.Struct, frozen=True):
    """Whom a valid key belongs to. `key` is None where no key is asked for."""

    tenant: str
    role: Role
    limits: TenantLimits = TenantLimits()
    key: str | None = None


class TenantStore:
    """The tenants and keys of a data directory. `key` is one more admin's, of any form, and is not kept."""

    def __init__(self, data: DataDir, key: str | None = None) -> None:
        self._data = data
        self._own = None if key is None else _hash(key)

    def create_tenant(self, name: str, limits: TenantLimits) -> None:
        """Add a tenant. Raises RequestError for a bad name or one that is or was taken.

        A revoked tenant's name stays taken: whoever had it would share its cache and its adapters.
        """
        if _NAME.fullmatch(name) is None:
            raise RequestError(
                f"{name[:80]!r} is no tenant's name: 1 to 63 of a-z, 0-9, - and _, a letter or digit first.",
                param="name",
            )
        for field, value in msgspec.structs.asdict(limits).items():
            if value is not None and value < 0:
                raise RequestError(f"`{field}` must not be negative.", param=field)
        try:
            with self._data.write() as db:
                db.execute(
                    "insert into tenants values (?, ?, null, ?)",
                    (name, int(time.time()), msgspec.json.encode(limits).decode()),
                )
        except sqlite3.IntegrityError:
            raise RequestError(f"There is or was a tenant {name!r}.", param="name") from None

    def list_tenants(self) -> list[Tenant]:
        """All of them, by name."""
        return [
            Tenant(row["name"], row["created"], row["revoked"], _limits(row))
            for row in self._data.rows("select * from tenants order by name")
        ]

    def change_limits(self, name: str, limits: TenantLimits) -> None:
        """Set the limits that are given; the others stay. Raises RequestError if there is no such tenant."""
        with self._data.write() as db:
            row = db.execute(
                "select limits from tenants where name = ? and revoked is null", (name,)
            ).fetchone()
            if row is None:
                raise RequestError(f"There is no tenant {name[:80]!r}.", param="name")
            changed = msgspec.json.encode(limits.or_else(_limits(row))).decode()
            db.execute("update tenants set limits = ? where name = ?", (changed, name))

    def revoke_tenant(self, name: str) -> None:
        """From now on none of the tenant's keys is valid. Raises RequestError if there is no such tenant."""
        self._revoke("tenants", "name", name)

    def create_key(self, tenant: str, role: Role) -> str:
        """A new key; this is the only time that it is seen. Raises RequestError without such a tenant."""
        id = secrets.token_hex(6)
        key = f"psn_{id}_{secrets.token_hex(32)}"
        with self._data.write() as db:
            if not db.execute(
                "select 1 from tenants where name = ? and revoked is null", (tenant,)
            ).fetchone():
                raise RequestError(
                    f"There is no tenant {tenant[:80]!r}: `personae tenants create` makes one.",
                    param="tenant",
                )
            db.execute(
                "insert into keys values (?, ?, ?, ?, ?, null)",
                (id, tenant, role, _hash(key), int(time.time())),
            )
        return key

    def list_keys(self) -> list[ApiKey]:
        """All of them, by tenant."""
        rows = self._data.rows("select id, tenant, role, created, revoked from keys order by tenant, created")
        return [ApiKey(*row) for row in rows]

    def revoke_key(self, id: str) -> None:
        """From now on the key is not valid. `id` may be the whole key. Raises RequestError if there is no
        such key."""
        match = _KEY.fullmatch(id)
        self._revoke("keys", "id", match[1] if match else id)

    def on_behalf_of(self, tenant: str) -> Identity | None:
        """Whom the server works for when nobody asks: a tenant that has not been revoked."""
        rows = self._data.rows(
            "select revoked, limits, exists (select 1 from keys where keys.tenant = name "
            "and role = 'admin' and keys.revoked is null) as admin from tenants where name = ?",
            (tenant,),
        )
        if not rows:
            return Identity(tenant, "tenant") if tenant == DEFAULT_TENANT else None
        if rows[0]["revoked"]:
            return None
        return Identity(tenant, "tenant", _limits_of(rows[0], "admin" if rows[0]["admin"] else "tenant"))

    def has_keys(self) -> bool:
        """Whether there ever was a key: then every request needs one."""
        return self._own is not None or bool(self._data.rows("select 1 from keys limit 1"))

    def identify(self, key: str) -> Identity | None:
        """Whom the key belongs to; None if it is not valid. Takes the same time for every wrong secret."""
        if self._own is not None and hmac.compare_digest(self._own, _hash(key)):
            return Identity(DEFAULT_TENANT, "admin")
        match = _KEY.fullmatch(key)
        rows = self._data.rows(
            "select keys.*, tenants.limits from keys join tenants on tenants.name = keys.tenant "
            "where keys.id = ? and keys.revoked is null and tenants.revoked is null",
            (match[1] if match else "",),
        )
        right = hmac.compare_digest(rows[0]["digest"] if rows else _NOBODY, _hash(key))
        if not rows or not right:
            return None
        role = rows[0]["role"]
        return Identity(rows[0]["tenant"], role, _limits_of(rows[0], role), rows[0]["id"])

    def _revoke(self, table: str, column: str, value: str) -> None:
        def change(db: sqlite3.Connection) -> None:
            done = db.execute(
                f"update {table} set revoked = coalesce(revoked, ?) where {column} = ?",  # noqa: S608  our own words
                (int(time.time()), value),
            )
            if not done.rowcount:
                raise RequestError(f"There is no such {table[:-1]}: {value[:80]!r}.", param=column)

        self._data.urgently(change)


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _limits_of(row: sqlite3.Row, role: Role) -> TenantLimits:
    """A tenant's limits for a key of that role."""
    return _limits(row) if role == "admin" else _limits(row).or_else(DEFAULTS)


def _limits(row: sqlite3.Row) -> TenantLimits:
    return msgspec.json.decode(row["limits"], type=TenantLimits)
