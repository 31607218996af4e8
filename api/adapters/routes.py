"""`/v1/adapters`, and vLLM's way to load and unload adapters from the server's own disk."""

import os
import re
from contextlib import aclosing
from pathlib import Path

import msgspec
from anyio import to_thread
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from personae.api.adapters.form import copy_folder, read_adapter_form
from personae.api.adapters.registry import AdapterRecord, Registry, no_such_adapter
from personae.api.decode import read_json
from personae.api.generation import Door, door_of
from personae.api.respond import json_response
from personae.api.schema import Body
from personae.api.tenants.access import admin_only
from personae.errors import Cancelled, Forbidden, NotFound, Overloaded, RequestError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class AdapterList(msgspec.Struct):
    """`GET /v1/adapters`."""

    data: list[AdapterRecord]
    object: str = "list"


class AdapterDeleted(msgspec.Struct):
    """`DELETE /v1/adapters/{name}`."""

    name: str
    object: str = "adapter"
    deleted: bool = True


class LoadRequest(Body):
    """`POST /v1/load_lora_adapter`, as vLLM has it."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadRequest(Body):
    """`POST /v1/unload_lora_adapter`, as vLLM has it."""

    lora_name: str
    lora_int_id: int | None = None


async def create(request: Request) -> Response:
    """`POST /v1/adapters`: upload an adapter; 201 when it can be used."""
    door = door_of(request)
    registry, who = _registry(door), door.caller.identity
    length = request.headers.get("content-length", "0")
    registry.check_room(who, int(length) if length.isdigit() else 0)
    with registry.stage(who.tenant) as folder:
        try:
            async with aclosing(request.stream()) as stream:
                kind = request.headers.get("content-type", "")
                form = await read_adapter_form(stream, kind, folder, door.settings.max_upload_bytes)
        except ClientDisconnect:
            raise Cancelled("The client went away before its upload was complete.") from None
        except OSError as error:
            raise Overloaded(
                f"The upload could not be written: {error.strerror}.", code="storage_failed"
            ) from error
        name, replace, shared = _checked(form.name), form.flag("replace"), form.flag("shared")
        if shared and who.role != "admin":
            raise Forbidden("Only an admin's key may share an adapter with all tenants.", param="shared")
        if form.base_model not in (None, door.base):
            raise RequestError(f"The base model here is `{door.base}`.", param="base_model")
        registry.check_name(who, name, replace)
        record = await registry.add(who, name, folder, replace=replace, shared=shared)
    return json_response(record, 201)


async def list_adapters(request: Request) -> Response:
    """`GET /v1/adapters`: the tenant's own and the shared ones."""
    door = door_of(request)
    return json_response(AdapterList(_registry(door).list(door.caller.tenant)))


async def get_adapter(request: Request) -> Response:
    """`GET /v1/adapters/{name}`."""
    door, name = door_of(request), request.path_params["name"]
    record = _registry(door).find(door.caller.tenant, name)
    if record is None:
        raise no_such_adapter(name)
    return json_response(record)


async def delete_adapter(request: Request) -> Response:
    """`DELETE /v1/adapters/{name}`: requests that run finish; new ones find nothing."""
    door, name = door_of(request), request.path_params["name"]
    await _registry(door).remove(door.caller.tenant, name)
    return json_response(AdapterDeleted(name))


@admin_only
async def load_lora_adapter(request: Request) -> Response:
    """`POST /v1/load_lora_adapter`: share an adapter from a folder below one of the configured roots."""
    door = door_of(request)
    registry, who = _registry(door), door.caller.identity
    body = await read_json(request, LoadRequest, door.settings.max_json_depth)
    name = _checked(body.lora_name, "lora_name")
    registry.check_name(who, name, body.load_inplace)
    source = await to_thread.run_sync(_below, body.lora_path, door.settings.adapter_roots)
    with registry.stage(who.tenant) as folder:
        try:
            await to_thread.run_sync(copy_folder, source, folder, door.settings.max_upload_bytes)
        except OSError as error:
            raise RequestError(f"`lora_path` cannot be read: {error.strerror}.", param="lora_path") from None
        await registry.add(who, name, folder, replace=body.load_inplace, shared=True)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@admin_only
async def unload_lora_adapter(request: Request) -> Response:
    """`POST /v1/unload_lora_adapter`."""
    door = door_of(request)
    body = await read_json(request, UnloadRequest, door.settings.max_json_depth)
    await _registry(door).remove(door.caller.tenant, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _registry(door: Door) -> Registry:
    if door.registry is None:
        raise NotFound("This server takes no adapters while it runs.", code="unknown_url")
    return door.registry


def _checked(name: str | None, field: str = "name") -> str:
    """A name that is safe wherever a name may go: in URLs, logs, metrics, file names."""
    if name is None:
        raise RequestError(f"`{field}` is required.", param=field, code="missing_required_parameter")
    if _NAME.fullmatch(name) is None:
        raise RequestError(
            f"`{field}` must be 1 to 64 of A-Z, a-z, 0-9, `.`, `_` and `-`, a letter or digit first.",
            param=field,
            code="invalid_name",
        )
    return name


def _below(path: str, roots: tuple[Path, ...]) -> Path:
    """The folder, with symbolic links followed, if it then lies below a root. Raises Forbidden.

    Whether there is anything at another place is not said.
    """
    if "\0" not in path and len(os.fsencode(path)) < 4096:
        folder = Path(path).resolve()
        if any(root.resolve() in folder.parents for root in roots):
            return folder
    raise Forbidden("`lora_path` is not below one of the server's --adapter-root folders.", param="lora_path")
