"""`/v1/adapters`, and vLLM's way to load and unload adapters from the server's own disk."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec
from anyio import to_thread
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from personae.api.adapters.checked_defaults import check_defaults
from personae.api.adapters.defaults import NO_DEFAULTS, RequestDefaults
from personae.api.adapters.records import AdapterRecord, no_such_adapter
from personae.api.adapters.registration import (
    FetchAdapter,
    base_of,
    check_asked,
    checked_name,
    register_source,
)
from personae.api.adapters.registry import Registry
from personae.api.adapters.upload import copy_folder, read_adapter_form
from personae.api.body import read_json
from personae.api.exchange import Exchange, exchange_of
from personae.api.generation import unless_disconnected
from personae.api.http.operation import Content, operation
from personae.api.http.upload import receiving
from personae.api.respond import json_response
from personae.api.storage import storage_failure
from personae.api.tenants.store import Identity
from personae.api.wire.schema import Body
from personae.errors import Conflict, Forbidden, NotFound, RequestError
from personae.lora.peft_names import CONFIG_FILE, TENSORS_FILE

_File = Annotated[str, Meta(extra_json_schema={"format": "binary"})]


class AdapterUpload(msgspec.Struct):
    """The form of an upload, for the description; `upload.py` reads it."""

    name: str
    config: _File = msgspec.field(name=CONFIG_FILE)
    tensors: _File = msgspec.field(name=TENSORS_FILE)
    base_model: str | UnsetType = UNSET
    replace: Literal["true", "false"] | UnsetType = UNSET
    shared: Literal["true", "false"] | UnsetType = UNSET


class AdapterList(msgspec.Struct):
    """`GET /v1/adapters`."""

    data: list[AdapterRecord]
    object: str = "list"


class OfTenant(msgspec.Struct):
    """Whose adapters an admin asks for."""

    tenant: str | UnsetType = UNSET


class ChangeAdapter(Body, kw_only=True):
    """`PATCH /v1/adapters/{name}`. A field that is absent does not change. `pinned` is the version that the
    name means from now on; null: the newest. `keep_loaded`, which takes an admin's key, keeps what the name
    means on the device. `defaults` changes those of the version that the name means;
    null removes all."""

    free_form: ClassVar[tuple[str, ...]] = ("defaults",)

    pinned: Annotated[int, Meta(ge=1, le=2**53)] | UnsetType | None = UNSET
    keep_loaded: bool | UnsetType = UNSET
    defaults: RequestDefaults | UnsetType | None = UNSET


class AdapterDeleted(msgspec.Struct):
    """`DELETE /v1/adapters/{name}`."""

    name: str
    object: str = "adapter"
    deleted: bool = True


class LoadRequest(Body):
    """`POST /v1/load_lora_adapter`, as in vLLM."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadRequest(Body):
    """`POST /v1/unload_lora_adapter`, as in vLLM."""

    lora_name: str
    lora_int_id: int | None = None


@operation(
    "POST",
    "/v1/adapters",
    body=(Content("multipart/form-data", AdapterUpload), FetchAdapter),
    query=OfTenant,
    answers={201: AdapterRecord},
    refuses=(404, 409),
)
async def create_adapter(request: Request) -> Response:
    """Upload an adapter, or have the server fetch one. It can be used as soon as this is answered. Admins may
    name the `tenant` that gets it, within that tenant's limits."""
    exchange = exchange_of(request)
    registry, who = registry_of(exchange), owner_of(request, exchange)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower().endswith("json"):
        body = await read_json(request, FetchAdapter, exchange)
        return json_response(
            await unless_disconnected(request.receive, lambda: _fetched(exchange, registry, who, body)), 201
        )
    async with receiving(request, who, registry.check_room, registry.files.stage) as (stream, folder):
        kind = request.headers.get("content-type", "")
        form = await read_adapter_form(stream, kind, folder, exchange.settings.max_upload_bytes)
        name, replace, shared = checked_name(form.name), form.flag("replace"), form.flag("shared")
        check_asked(exchange, shared, form.base_model)
        registry.check_name(who, name, replace)
        base = await base_of(exchange, form.base_model, folder)
        record = await registry.add(who, name, folder, replace=replace, shared=shared, base=base)
    return json_response(record, 201)


async def _fetched(
    exchange: Exchange, registry: Registry, who: Identity, body: FetchAdapter
) -> AdapterRecord:
    exchange.caller.ready()  # a fetch takes time, and nothing of the body is needed any more
    defaults = None if body.defaults is None else NO_DEFAULTS.changed(body.defaults)
    if defaults is not None:
        await check_defaults(exchange, defaults)
    return await register_source(exchange, registry, who, body, defaults)


@operation("GET", "/v1/adapters", query=OfTenant, answers={200: AdapterList}, refuses=(404,))
async def list_adapters(request: Request) -> Response:
    """List the tenant's own adapters and the shared ones. Admins may name a `tenant`, or `*`."""
    exchange = exchange_of(request)
    registry, asked = registry_of(exchange), request.query_params.get("tenant")
    if asked is None:
        return json_response(_listed(registry.list(exchange.caller.tenant)))
    tenant = None if asked == "*" else asked
    _check_tenant(exchange, tenant)
    return json_response(_listed(registry.own(tenant)))


def _listed(records: Iterable[AdapterRecord]) -> AdapterList:
    """The records without their defaults, which may be long."""
    return AdapterList([msgspec.structs.replace(record, defaults=UNSET) for record in records])


@operation("GET", "/v1/adapters/{name}", query=OfTenant, answers={200: AdapterRecord}, refuses=(404,))
async def get_adapter(request: Request) -> Response:
    """Show an adapter. Admins may name another `tenant`, whose own it is then."""
    exchange, name = exchange_of(request), request.path_params["name"]
    if "tenant" in request.query_params:
        return json_response(registry_of(exchange).own_version(tenant_of(request, exchange), name))
    record = registry_of(exchange).find(exchange.caller.tenant, name)
    if record is None:
        raise _not_found(exchange, exchange.caller.tenant, name)
    return json_response(record)


def _not_found(exchange: Exchange, tenant: str, name: str) -> NotFound:
    """The error for a name that no adapter of the tenant has, or that one of the server's own has."""
    if name not in exchange.client.models(tenant):
        return no_such_adapter(name)
    shown = name[:80]
    message = (
        f"`{shown}` was not uploaded: it has no versions and cannot be changed; /v1/models/{shown} shows it."
    )
    return NotFound(message, param="name", code="adapter_not_found")


@operation("GET", "/v1/adapters/{name}/versions", answers={200: AdapterList}, refuses=(404,))
async def list_versions(request: Request) -> Response:
    """List the versions of an adapter that are kept, the newest first. Requests name one as `name@N`."""
    exchange, name = exchange_of(request), request.path_params["name"]
    records = registry_of(exchange).versions(exchange.caller.tenant, name)
    if not records:
        raise _not_found(exchange, exchange.caller.tenant, name)
    return json_response(_listed(records))


@operation(
    "PATCH",
    "/v1/adapters/{name}",
    body=ChangeAdapter,
    query=OfTenant,
    answers={200: AdapterRecord},
    refuses=(404, 409),
)
async def change_adapter(request: Request) -> Response:
    """Pin one of the tenant's own adapters to a version, or let its name mean the newest again; keep what it
    means on the device, so that no request waits until it is loaded; change the
    defaults of the version that it means then, or of `name@N`. Requests that run keep what they began with.
    Admins may name another `tenant`."""
    exchange, name = exchange_of(request), request.path_params["name"]
    registry, tenant = registry_of(exchange), tenant_of(request, exchange)
    body = await read_json(request, ChangeAdapter, exchange)
    if registry.find(tenant, name) is None:
        raise _not_found(exchange, tenant, name)
    changes = [name for name in ("pinned", "keep_loaded", "defaults") if getattr(body, name) is not UNSET]
    if len(changes) > 1:
        words = " and ".join(f"`{name}`" for name in changes)
        raise RequestError(f"Change {words} one after the other.", param=changes[-1])
    if body.keep_loaded is not UNSET:
        if exchange.caller.identity.role != "admin":
            raise Forbidden("Only an admin's key may keep an adapter loaded.", param="keep_loaded")
        return json_response(await registry.keep_loaded(tenant, name, body.keep_loaded))
    if body.pinned is not UNSET:
        return json_response(await registry.pin(tenant, name, body.pinned))
    record = registry.own_version(tenant, name)
    if body.defaults is not UNSET:
        known = record.defaults or NO_DEFAULTS
        defaults = NO_DEFAULTS if body.defaults is None else known.changed(body.defaults)
        await check_defaults(exchange, defaults)
        record = await registry.set_defaults(tenant, name, defaults)
    return json_response(record)


@operation("DELETE", "/v1/adapters/{name}", query=OfTenant, answers={200: AdapterDeleted}, refuses=(404, 409))
async def delete_adapter(request: Request) -> Response:
    """Remove one of the tenant's own adapters with all its versions, or the version `name@N`: requests that
    run finish, and new ones get a 404. Admins may name another `tenant`."""
    exchange, name = exchange_of(request), request.path_params["name"]
    tenant = request.query_params.get("tenant", exchange.caller.tenant)
    _check_tenant(exchange, tenant)
    await registry_of(exchange).remove(tenant, name)
    return json_response(AdapterDeleted(name))


@operation(
    "POST",
    "/v1/load_lora_adapter",
    body=LoadRequest,
    answers={200: Content("text/plain")},
    refuses=(404, 409),
    admin=True,
)
async def load_lora_adapter(request: Request) -> Response:
    """Share an adapter from a folder below one of the configured roots, as in vLLM."""
    exchange = exchange_of(request)
    registry, who = registry_of(exchange), exchange.caller.identity
    body = await read_json(request, LoadRequest, exchange)
    name = checked_name(body.lora_name, "lora_name")
    with _as_in_vllm():
        registry.check_name(who, name, body.load_inplace)
    source = await to_thread.run_sync(_below, body.lora_path, exchange.settings.adapter_root)
    async with registry.files.stage_in_turn(who.tenant) as folder:
        try:
            await to_thread.run_sync(
                copy_folder, source, folder, exchange.settings.max_upload_bytes, "lora_path"
            )
        except OSError as error:
            if (failure := storage_failure(error)) is not None:
                raise failure from error
            raise RequestError(f"`lora_path` cannot be read: {error.strerror}.", param="lora_path") from None
        base = await base_of(exchange, None, folder)
        with _as_in_vllm():
            await registry.add(who, name, folder, replace=body.load_inplace, shared=True, base=base)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@operation(
    "POST",
    "/v1/unload_lora_adapter",
    body=UnloadRequest,
    answers={200: Content("text/plain")},
    refuses=(404, 409),
    admin=True,
)
async def unload_lora_adapter(request: Request) -> Response:
    """Remove a shared adapter, as in vLLM."""
    exchange = exchange_of(request)
    body = await read_json(request, UnloadRequest, exchange)
    with _as_in_vllm():
        await registry_of(exchange).remove(exchange.caller.tenant, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@contextmanager
def _as_in_vllm() -> Iterator[None]:
    """Errors inside the block name the fields of vLLM's routes."""
    try:
        yield
    except (Conflict, NotFound) as error:
        error.param = "lora_name" if error.param == "name" else error.param
        error.message = error.message.replace("`replace`", "`load_inplace`")
        raise


def tenant_of(request: Request, exchange: Exchange) -> str:
    """The tenant that a request is for: the caller's own, or the `tenant` that an admin names. Raises
    Forbidden, and NotFound for a tenant that does not exist."""
    tenant = request.query_params.get("tenant", exchange.caller.tenant)
    _check_tenant(exchange, tenant)
    if tenant != exchange.caller.tenant and exchange.services.tenants is not None:
        exchange.services.tenants.find_tenant(tenant)
    return tenant


def owner_of(request: Request, exchange: Exchange) -> Identity:
    """Who gets what a request uploads: the caller, or the `tenant` that an admin names. Raises Forbidden, and
    NotFound for a tenant that does not exist or is revoked."""
    tenant = tenant_of(request, exchange)
    if tenant == exchange.caller.tenant or exchange.services.tenants is None:
        return exchange.caller.identity
    owner = exchange.services.tenants.on_behalf_of(tenant)
    if owner is None:
        raise NotFound(f"The tenant `{tenant[:80]}` is revoked.", param="tenant")
    return owner


def _check_tenant(exchange: Exchange, tenant: str | None) -> None:
    """Raises Forbidden if the caller may not look at the tenant's adapters; None means all tenants."""
    who = exchange.caller.identity
    if who.role != "admin" and tenant != who.tenant:
        raise Forbidden("Only an admin's key may ask for another tenant's adapters.", param="tenant")


def registry_of(exchange: Exchange) -> Registry:
    """The registry. Raises NotFound if there is none."""
    if exchange.services.registry is None:
        raise NotFound("This server takes no adapters while it runs.", code="unknown_url")
    return exchange.services.registry


def _below(path: str, roots: tuple[Path, ...]) -> Path:
    """The folder, with symbolic links followed, if it is then below a root. Raises Forbidden.

    The error does not say whether anything exists elsewhere.
    """
    if not roots:
        raise Forbidden(
            "No folder may be loaded from: start the server with --adapter-root.", param="lora_path"
        )
    if "\0" not in path and len(os.fsencode(path)) < 4096:
        folder = Path(path).resolve()
        if any(root.resolve() in folder.parents for root in roots):
            return folder
    raise Forbidden("`lora_path` is not below one of the server's --adapter-root folders.", param="lora_path")
