"""`/v1/adapter_aliases`: names that stand for several models."""

import msgspec
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response

from personae.api.adapters.aliases import AliasRecord, check_targets, no_such_alias
from personae.api.adapters.registration import checked_name
from personae.api.adapters.registry import Registry
from personae.api.adapters.routes import OfTenant, registry_of, tenant_of
from personae.api.body import read_json
from personae.api.exchange import Exchange, exchange_of
from personae.api.http.operation import operation
from personae.api.respond import json_response
from personae.api.wire.schema import Body
from personae.errors import Conflict, Forbidden, NotFound


class PutAlias(Body, kw_only=True):
    """`PUT /v1/adapter_aliases/{name}`: for each model the weight of its part of the requests."""

    targets: dict[str, float]
    shared: bool = False


class AliasList(msgspec.Struct):
    """`GET /v1/adapter_aliases`."""

    data: list[AliasRecord]
    object: str = "list"


class AliasDeleted(msgspec.Struct):
    """`DELETE /v1/adapter_aliases/{name}`."""

    name: str
    object: str = "adapter_alias"
    deleted: bool = True


@operation(
    "PUT",
    "/v1/adapter_aliases/{name}",
    body=PutAlias,
    query=OfTenant,
    answers={200: AliasRecord},
    refuses=(404, 409),
)
async def put_alias(request: Request) -> Response:
    """Make an alias, or change its targets. Requests that name it in `model` are split by the weights. Admins
    may name another `tenant`."""
    exchange = exchange_of(request)
    registry, name = registry_of(exchange), checked_name(request.path_params["name"])
    tenant = tenant_of(request, exchange)
    body = await read_json(request, PutAlias, exchange)
    if body.shared and exchange.caller.identity.role != "admin":
        raise Forbidden("Only an admin's key may share an alias with all tenants.", param="shared")
    if name in exchange.client.models(tenant):
        raise Conflict(f"The name `{name}` is the server's own; choose another.", param="name")
    check_targets(body.targets)
    for target in body.targets:
        if not _exists(exchange, registry, tenant, target):
            raise NotFound(
                f"`targets`: the model `{target[:80]}` does not exist.",
                param="targets",
                code="model_not_found",
            )
    if exchange.services.base_models is not None:
        exchange.services.base_models.check_alike(tenant, body.targets)
    record = await to_thread.run_sync(
        lambda: registry.aliases.put(tenant, name, body.targets, shared=body.shared)
    )
    return json_response(record)


def _exists(exchange: Exchange, registry: Registry, tenant: str, name: str) -> bool:
    own = name in exchange.client.models(tenant)
    own = own or (
        exchange.services.base_models is not None and exchange.services.base_models.has(tenant, name)
    )
    return own or registry.find(tenant, name) is not None


@operation("GET", "/v1/adapter_aliases", query=OfTenant, answers={200: AliasList}, refuses=(404,))
async def list_aliases(request: Request) -> Response:
    """List the tenant's own aliases and the shared ones. Admins may name another `tenant`."""
    exchange = exchange_of(request)
    return json_response(AliasList(registry_of(exchange).aliases.list(tenant_of(request, exchange))))


@operation("GET", "/v1/adapter_aliases/{name}", query=OfTenant, answers={200: AliasRecord}, refuses=(404,))
async def get_alias(request: Request) -> Response:
    """Show an alias."""
    exchange, name = exchange_of(request), request.path_params["name"]
    record = registry_of(exchange).aliases.find(tenant_of(request, exchange), name)
    if record is None:
        raise no_such_alias(name)
    return json_response(record)


@operation(
    "DELETE", "/v1/adapter_aliases/{name}", query=OfTenant, answers={200: AliasDeleted}, refuses=(404,)
)
async def delete_alias(request: Request) -> Response:
    """Remove one of the tenant's own aliases. Requests that run finish. Admins may name another `tenant`."""
    exchange, name = exchange_of(request), request.path_params["name"]
    aliases, tenant = registry_of(exchange).aliases, tenant_of(request, exchange)
    await to_thread.run_sync(aliases.remove, tenant, name)
    return json_response(AliasDeleted(name))
