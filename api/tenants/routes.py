"""`/v1/tenants`, `/v1/keys` and `/v1/usage`: administration while the server runs."""

from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec
from anyio import to_thread
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from personae.api.body import read_json
from personae.api.exchange import Exchange, exchange_of
from personae.api.http.operation import Content, operation
from personae.api.respond import json_response
from personae.api.tenants.limits import limits_of
from personae.api.tenants.store import ApiKey, LimitChanges, Role, Tenant, TenantLimits, TenantStore
from personae.api.tenants.usage import UsageLedger, UsageRow, as_csv, columns_of
from personae.api.wire.schema import Body
from personae.errors import Conflict, Forbidden, NotFound, RequestError

T = TypeVar("T")

_MAX_OVERLAP = 30 * 86400


class CreateTenant(Body, kw_only=True):
    """`POST /v1/tenants`."""

    name: str
    limits: LimitChanges | None = None


class ChangeTenant(Body, kw_only=True):
    """`PATCH /v1/tenants/{name}`."""

    limits: LimitChanges


class FreeTenant(msgspec.Struct):
    """The query of `DELETE /v1/tenants/{name}`."""

    free: Literal["true", "false"] | UnsetType = UNSET


class TenantList(msgspec.Struct):
    """All tenants."""

    data: list[Tenant]
    object: str = "list"


class TenantDeleted(msgspec.Struct):
    """The answer of `DELETE /v1/tenants/{name}`. Its keys are revoked; if `freed`, its name is free again."""

    name: str
    freed: bool
    object: str = "tenant"
    deleted: bool = True


class CreateKey(Body, kw_only=True):
    """`POST /v1/keys`. `expires` is a Unix time in seconds."""

    tenant: str
    role: Role = "tenant"
    label: str = ""
    expires: int | None = None


class ChangeKey(Body, kw_only=True):
    """`PATCH /v1/keys/{id}`. A field that is absent does not change; null means no expiry."""

    label: str | UnsetType = UNSET
    expires: int | UnsetType | None = UNSET


class RotateKey(Body, kw_only=True):
    """`POST /v1/keys/{id}/rotate`. `overlap`: how many seconds the old key stays valid."""

    overlap: int = 0


class NewKey(msgspec.Struct):
    """A new key; `secret` is the whole key, which is shown only once."""

    id: str
    tenant: str
    role: Role
    created: int
    label: str
    expires: int | None
    secret: str
    object: str = "key"


class KeyList(msgspec.Struct):
    """Keys without their secrets."""

    data: list[ApiKey]
    object: str = "list"


class ListKeys(msgspec.Struct):
    """The query of `GET /v1/keys`."""

    tenant: str | UnsetType = UNSET


class Today(msgspec.Struct, frozen=True):
    """Tokens and money of the day, in UTC, and the Unix time at which the next one begins."""

    tokens: int
    spend: float
    resets: int


class Account(msgspec.Struct, frozen=True):
    """The answer of `GET /v1/account`. `today` is null if the server keeps no usage."""

    tenant: str
    role: Role
    limits: TenantLimits
    today: Today | None
    object: str = "account"


class ListUsage(msgspec.Struct):
    """The query of `GET /v1/usage`. `from` (inclusive) and `to` (exclusive) are Unix times of hours, in
    seconds. An empty `key` or `adapter` is none. `group_by` has some of hour, tenant, key, adapter and
    version, separated by commas."""

    begin: str | UnsetType = msgspec.field(name="from", default=UNSET)
    end: str | UnsetType = msgspec.field(name="to", default=UNSET)
    tenant: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    adapter: str | UnsetType = UNSET
    group_by: str | UnsetType = UNSET
    format: Literal["json", "csv"] | UnsetType = UNSET


class UsageList(msgspec.Struct):
    """What was used. `truncated`: there is more; ask for fewer hours."""

    data: list[UsageRow]
    truncated: bool
    object: str = "list"


@operation("POST", "/v1/tenants", body=CreateTenant, answers={201: Tenant}, refuses=(404, 409), admin=True)
async def create_tenant(request: Request) -> Response:
    """Add a tenant."""
    exchange = exchange_of(request)
    store = _tenants(exchange)
    body = await read_json(request, CreateTenant, exchange)
    named = {} if body.limits is None else body.limits.named()
    await _written(lambda: store.create_tenant(body.name, TenantLimits(**named)))
    return json_response(store.find_tenant(body.name), 201)


@operation("GET", "/v1/tenants", answers={200: TenantList}, refuses=(404,), admin=True)
async def list_tenants(request: Request) -> Response:
    """List the tenants, revoked ones included."""
    return json_response(TenantList(_tenants(exchange_of(request)).list_tenants()))


@operation("GET", "/v1/tenants/{name}", answers={200: Tenant}, refuses=(404,), admin=True)
async def get_tenant(request: Request) -> Response:
    """Show a tenant."""
    return json_response(_tenants(exchange_of(request)).find_tenant(request.path_params["name"]))


@operation(
    "PATCH", "/v1/tenants/{name}", body=ChangeTenant, answers={200: Tenant}, refuses=(404,), admin=True
)
async def change_tenant(request: Request) -> Response:
    """Change limits of a tenant. They apply from its next request on."""
    exchange, name = exchange_of(request), request.path_params["name"]
    store = _tenants(exchange)
    body = await read_json(request, ChangeTenant, exchange)
    return json_response(await _written(lambda: store.set_limits(name, body.limits.named())))


@operation(
    "DELETE",
    "/v1/tenants/{name}",
    query=FreeTenant,
    answers={200: TenantDeleted},
    refuses=(404, 409),
    admin=True,
)
async def delete_tenant(request: Request) -> Response:
    """Revoke a tenant with all its keys. With `free=true`, also remove its data and free its name."""
    exchange, name = exchange_of(request), request.path_params["name"]
    store, registry = _tenants(exchange), exchange.services.registry
    free = request.query_params.get("free", "false")
    if free not in ("true", "false"):
        raise RequestError("`free` must be true or false.", param="free")
    await _written(lambda: store.revoke_tenant(name))
    exchange.services.revocations.check()
    if free == "true":
        if registry is not None:
            for record in registry.own(name):
                await registry.remove(name, record.name)
        if exchange.services.usage is not None:
            await _written(exchange.services.usage.flush)
        await _written(lambda: store.free_tenant(name))
    return json_response(TenantDeleted(name, free == "true"))


@operation("POST", "/v1/keys", body=CreateKey, answers={201: NewKey}, refuses=(404, 409), admin=True)
async def create_key(request: Request) -> Response:
    """Make a key for a tenant. The answer has the whole key, which cannot be shown again."""
    exchange = exchange_of(request)
    store = _tenants(exchange)
    body = await read_json(request, CreateKey, exchange)
    if body.role != "admin" and not store.has_admin:
        raise Conflict(
            "The first key must be an admin's (`role`): from then on every request needs a key, and no other "
            "could make another.",
            param="role",
        )
    label, expires = body.label, body.expires
    key = await _written(lambda: store.create_key(body.tenant, body.role, label=label, expires=expires))
    return json_response(_new(store, key), 201)


@operation("GET", "/v1/keys", query=ListKeys, answers={200: KeyList}, refuses=(404,), admin=True)
async def list_keys(request: Request) -> Response:
    """List the keys, revoked ones included, without their secrets."""
    exchange = exchange_of(request)
    if exchange.services.usage is not None:
        await _written(exchange.services.usage.flush)
    keys = _tenants(exchange).list_keys(request.query_params.get("tenant"))
    return json_response(KeyList(keys))


@operation("GET", "/v1/keys/{id}", answers={200: ApiKey}, refuses=(404,), admin=True)
async def get_key(request: Request) -> Response:
    """Show a key without its secret."""
    return json_response(_tenants(exchange_of(request)).find_key(request.path_params["id"]))


@operation("PATCH", "/v1/keys/{id}", body=ChangeKey, answers={200: ApiKey}, refuses=(404,), admin=True)
async def change_key(request: Request) -> Response:
    """Change a key's label or expiry."""
    exchange, id = exchange_of(request), request.path_params["id"]
    store = _tenants(exchange)
    body = await read_json(request, ChangeKey, exchange)
    fields = {"label": body.label, "expires": body.expires}
    named = {name: value for name, value in fields.items() if value is not UNSET}
    return json_response(await _written(lambda: store.change_key(id, named)))


@operation("POST", "/v1/keys/{id}/rotate", body=RotateKey, answers={201: NewKey}, refuses=(404,), admin=True)
async def rotate_key(request: Request) -> Response:
    """Replace a key by a new one like it. The old key stays valid for `overlap` seconds."""
    exchange, id = exchange_of(request), request.path_params["id"]
    store = _tenants(exchange)
    body = await read_json(request, RotateKey, exchange)
    if not 0 <= body.overlap <= _MAX_OVERLAP:
        raise RequestError(f"`overlap` must be from 0 to {_MAX_OVERLAP} seconds.", param="overlap")
    key = await _written(lambda: store.rotate_key(id, body.overlap))
    exchange.services.revocations.check()
    return json_response(_new(store, key), 201)


@operation("DELETE", "/v1/keys/{id}", answers={200: ApiKey}, refuses=(404,), admin=True)
async def delete_key(request: Request) -> Response:
    """Revoke a key, and end what runs for it."""
    exchange, id = exchange_of(request), request.path_params["id"]
    store = _tenants(exchange)
    await _written(lambda: store.revoke_key(id))
    exchange.services.revocations.check()
    return json_response(store.find_key(id))


@operation(
    "GET",
    "/v1/usage",
    query=ListUsage,
    answers={200: (UsageList, Content("text/csv"))},
    refuses=(404,),
)
async def get_usage(request: Request) -> Response:
    """Show usage by hour, tenant, key and adapter. A tenant's key sees its own tenant's usage."""
    exchange, query = exchange_of(request), request.query_params
    ledger, who = _usage(exchange), exchange.caller.identity
    tenant = query.get("tenant", None if who.role == "admin" else who.tenant)
    if who.role != "admin" and tenant != who.tenant:
        raise Forbidden("Only an admin's key may ask for another tenant's usage.", param="tenant")
    group_by = columns_of(query.get("group_by", "hour,tenant,key,adapter"))
    begin, end = _time(query.get("from"), "from"), _time(query.get("to"), "to")
    format = query.get("format", "json")
    if format not in ("json", "csv"):
        raise RequestError("`format` must be json or csv.", param="format")
    await _written(ledger.flush)
    key, adapter = query.get("key"), query.get("adapter")
    rows, more = await to_thread.run_sync(
        lambda: ledger.rows(group_by, tenant=tenant, key=key, adapter=adapter, begin=begin, end=end)
    )
    if format == "csv":
        return Response(as_csv(rows, group_by), media_type="text/csv")
    return json_response(UsageList(rows, more))


@operation("GET", "/v1/account", answers={200: Account})
async def get_account(request: Request) -> Response:
    """Show the caller's own tenant: its limits, and what it has used of the day."""
    exchange = exchange_of(request)
    who = exchange.caller.identity
    today = None
    if exchange.services.budgets is not None:
        use = exchange.services.budgets.status(who)
        today = Today(use.tokens, use.spend, use.resets)
    return json_response(Account(who.tenant, who.role, limits_of(who), today))


def _time(text: str | None, param: str) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise RequestError(f"`{param}` must be a Unix time in seconds.", param=param)
    return int(text)


def _new(store: TenantStore, key: str) -> NewKey:
    made = store.find_key(key)
    return NewKey(made.id, made.tenant, made.role, made.created, made.label, made.expires, key)


def _tenants(exchange: Exchange) -> TenantStore:
    if exchange.services.tenants is None:
        raise NotFound("This server has no tenants.", code="no_tenants")
    return exchange.services.tenants


def _usage(exchange: Exchange) -> UsageLedger:
    if exchange.services.usage is None:
        raise NotFound("This server keeps no usage.", code="no_usage")
    return exchange.services.usage


async def _written(work: Callable[[], T]) -> T:
    """The result of `work`, run in a thread because it waits for the disk."""
    return await to_thread.run_sync(work)
