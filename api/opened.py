"""An open engine, and what the API needs to know about its model."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from personae.api.options import ServeOptions, shared
from personae.api.settings import ApiSettings
from personae.errors import PersonaeError

if TYPE_CHECKING:
    from personae.actors.client import EngineClient
    from personae.actors.replicas.scaling import ReplicaScaler
    from personae.api.base_models.base_models import BaseModels
    from personae.engine.generation_config import GenerationDefaults
    from personae.lora.bounds import AdapterBounds


async def _never() -> None:
    await anyio.sleep_forever()


def _ignore(error: PersonaeError) -> None:
    pass


def _nothing() -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Opened:
    """An open engine, and what else the API needs to know of the model.

    `max_adapters` is the number of adapters that fit in memory at once, `bounds` the limits for each of them;
    None if unknown. `lost` waits until the engine has failed for good. `end_all` ends every stream with an
    error, and refuses new ones with it. `describe` says what every actor is doing, `about` what was opened.
    `scaler` adds and removes engines, if there may be several. `model` is the folder or file of the model,
    from which other processes load its tokenizer. `base_models` has all bases, if there may be several; the
    rest is the first one's.
    """

    client: "EngineClient"
    defaults: "GenerationDefaults"
    max_adapters: int | None = None
    bounds: "AdapterBounds | None" = None
    lost: Callable[[], Awaitable[None]] = _never
    end_all: Callable[[PersonaeError], None] = _ignore
    describe: Callable[[], str] = _nothing
    about: str = ""
    scaler: "ReplicaScaler | None" = None
    model: Path | None = None
    base_models: "BaseModels | None" = None


def serve_settings(options: ServeOptions, opened: Opened) -> ApiSettings:
    """The settings for an engine that was opened with these options."""
    return ApiSettings(
        **shared(options, ApiSettings),
        defaults=opened.defaults,
        max_adapters=opened.max_adapters,
        max_rank=None if opened.bounds is None else opened.bounds.max_rank,
        embedding_size=_embedding_size(opened),
        about=opened.about,
    )


def _embedding_size(opened: Opened) -> int | None:
    vocabulary = None if opened.bounds is None else opened.bounds.shapes.vocabulary
    return None if vocabulary is None else vocabulary[1]
