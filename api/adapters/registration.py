"""What an upload and a fetch have in common: which names and bases are allowed, and how a source becomes a
registered adapter."""

import re
from pathlib import Path
from typing import ClassVar

from personae.api.adapters.defaults import RequestDefaults
from personae.api.adapters.records import AdapterRecord
from personae.api.adapters.registry import Registry
from personae.api.adapters.sources.fetch import FetchJob, fetch
from personae.api.adapters.sources.url import allowed_prefix, parse_source
from personae.api.base_models.served import base_of_upload
from personae.api.exchange import Exchange
from personae.api.tenants.store import Identity
from personae.api.wire.schema import Body
from personae.errors import Forbidden, RequestError, StorageFailed

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class FetchAdapter(Body, kw_only=True):
    """An adapter that the server fetches from `source`, such as `hf://org/name@revision`, instead of an
    upload. Without a `name` it has the last part of its source's. `defaults` as in a change."""

    free_form: ClassVar[tuple[str, ...]] = ("defaults",)

    source: str
    name: str | None = None
    base_model: str | None = None
    replace: bool = False
    shared: bool = False
    defaults: RequestDefaults | None = None


async def register_source(
    exchange: Exchange,
    registry: Registry,
    who: Identity,
    body: FetchAdapter,
    defaults: RequestDefaults | None = None,
) -> AdapterRecord:
    """Fetch an adapter and register it, with `defaults` that have been checked. Raises what an upload raises,
    and what `fetch` does."""
    settings, source = exchange.settings, parse_source(body.source)
    prefix = allowed_prefix(source, settings.adapter_source)
    name = checked_name(source.name if body.name is None else body.name)
    check_asked(exchange, body.shared, body.base_model)
    registry.check_name(who, name, body.replace)
    registry.check_room(who, 0)
    try:
        with registry.files.stage(who.tenant) as folder:
            job = FetchJob(source, prefix, str(folder), settings.max_upload_bytes, settings.upload_seconds)
            exact = await fetch(job)
            base = await base_of(exchange, body.base_model, folder)
            return await registry.add(
                who,
                name,
                folder,
                replace=body.replace,
                shared=body.shared,
                source=exact,
                defaults=defaults,
                base=base,
            )
    except OSError as error:
        raise StorageFailed(f"The adapter could not be written: {error.strerror}.") from error


def check_asked(exchange: Exchange, shared: bool, base: str | None) -> None:
    """Raises Forbidden or RequestError for what no caller, or not this one, may ask for."""
    if shared and exchange.caller.identity.role != "admin":
        raise Forbidden("Only an admin's key may share an adapter with all tenants.", param="shared")
    if base is not None and exchange.services.base_models is not None:
        exchange.services.base_models.check_name(base)
    elif base is not None and base not in exchange.bases:
        raise RequestError(f"The base model here is `{exchange.base}`.", param="base_model")


async def base_of(exchange: Exchange, named: str | None, folder: Path) -> str | None:
    """The base of an adapter whose files are in `folder`, of a server with several."""
    bases = exchange.services.base_models
    return None if bases is None else (await base_of_upload(exchange, bases, named, folder)).name


def checked_name(name: str | None, field: str = "name") -> str:
    """A name that is safe in URLs, logs, metrics and file names."""
    if name is None:
        raise RequestError(f"`{field}` is required.", param=field, code="missing_required_parameter")
    if _NAME.fullmatch(name) is None:
        raise RequestError(
            f"`{field}` must be 1 to 64 of A-Z, a-z, 0-9, `.`, `_` and `-`, a letter or digit first.",
            param=field,
            code="invalid_name",
        )
    return name
