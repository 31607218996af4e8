"""One of several base models for one request, once its engine has started."""

from pathlib import Path

import anyio
import msgspec

from personae.api.base_models.base_models import BaseModel, BaseModels
from personae.api.exchange import Exchange
from personae.api.opened import serve_settings
from personae.errors import DeadlineExceeded
from personae.lora.peft_names import CONFIG_FILE


class _AdapterConfig(msgspec.Struct):
    """What of an adapter's config says which base it is for."""

    base_model_name_or_path: str | None = None


async def answered_by(exchange: Exchange, base: BaseModel) -> Exchange:
    """The exchange with this base's services. Waits until its engine has started for the first time. Raises
    Overloaded."""
    if base.services is None:
        try:
            with anyio.fail_after(max(exchange.deadline(None) - anyio.current_time(), 0)):
                await _load(exchange, base)
        except TimeoutError:
            raise DeadlineExceeded(
                f"The model `{base.name}` did not start within the request's timeout."
            ) from None
    assert base.services is not None
    return exchange.with_services(base.services)


async def _load(exchange: Exchange, base: BaseModel) -> None:
    async with base.starting:
        if base.services is None:
            async with base.engine.using() as opened:
                services, registry = exchange.services, exchange.services.registry
                own = services.of_base(base.engine, serve_settings(base.options, opened))
                if registry is not None and opened.bounds is not None:
                    names = base.engine.models(exchange.caller.tenant)
                    registry.add_base(base.name, names, opened.bounds)
                services.metrics.add_engine(base.engine, base.name)
                base.services = own


async def base_of_upload(exchange: Exchange, bases: BaseModels, named: str | None, folder: Path) -> BaseModel:
    """The base of an adapter whose files are in `folder`: the one that is named, else the one that its config
    names, else the first. It has been started once then. Raises Overloaded."""
    base = bases.named(named) if named is not None else _trained_for(bases, folder)
    await answered_by(exchange, base)
    return base


def _trained_for(bases: BaseModels, folder: Path) -> BaseModel:
    try:
        config = msgspec.json.decode((folder / CONFIG_FILE).read_bytes(), type=_AdapterConfig)
    except (OSError, msgspec.MsgspecError):
        return bases.first  # whose check says what is wrong
    trained = config.base_model_name_or_path
    return next((base for base in bases if trained and base.is_for(trained)), bases.first)
