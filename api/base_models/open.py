"""Opens the base models of `personae serve --model NAME=MODEL …`."""

import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from anyio import to_thread

from personae.actors.frontend.engine_process import Progress
from personae.actors.on_demand import EngineMemory, OnDemandEngine
from personae.api.base_models.base_models import BaseModel, BaseModels
from personae.api.base_models.measure import measured
from personae.api.base_models.names import named_models
from personae.api.hub.resolve import names_the_hub, on_disk
from personae.api.local import engine_options_of, open_engine
from personae.api.opened import Opened
from personae.api.options import ServeOptions
from personae.errors import LoadError
from personae.kernels.cgroup import free_memory
from personae.kernels.sizes import size_text

_log = logging.getLogger("personae.engine")

_OF_ONE_MODEL = (
    *("model", "served_model_name", "draft_model", "adapters", "kv_events", "ray", "dist_init_addr"),
    *("tool_format", "reasoning_format"),
)
"""Options that say something of one model, or that belong to a single group of engines."""


def options_by_name(options: ServeOptions) -> dict[str, ServeOptions]:
    """The options of each model, by its name. All models have the same, except for a folder of their own in
    that of `--kv-disk`. Raises LoadError for an option that cannot be for several models."""
    if not options.models:
        given = "--models-memory" if options.keep_alive is None else "--keep-alive"
        raise LoadError(f"{given} needs --model NAME=MODEL.")
    for name in _OF_ONE_MODEL:
        if getattr(options, name):
            spelled = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
            raise LoadError(f"{spelled} is for one model; with --model NAME=MODEL leave it out.")
    if not options.replicas.fixed:
        raise LoadError(
            f"--replicas {options.replicas} is for one model; with --model NAME=MODEL give one number."
        )
    return {
        name: replace(
            options,
            model=model,
            models=(),
            keep_alive=None,
            models_memory=None,
            served_model_name=name,
            kv_disk=None if options.kv_disk is None else options.kv_disk / name.replace("/", "--"),
        )
        for name, model in named_models(options.models).items()
    }


@asynccontextmanager
async def open_base_models(
    options: ServeOptions,
    on_progress: Progress | None = None,
    *,
    adapter_store: Path | None = None,
    secret: bytes | None = None,
) -> AsyncIterator[Opened]:
    """Do for several models what `open_engine` does for one: measure all, start the first, and have the
    others start with their first request. Models on the Hub are downloaded now.

    Raises LoadError, also for a model that could never be loaded within `--models-memory`.
    """
    by_name = options_by_name(options)
    limit = options.models_memory or free_memory()
    memory = EngineMemory(2**63 if limit is None else limit)
    here = [await _on_disk(own) for own in by_name.values()]
    sizes = await measured([engine_options_of(own, adapter_store, secret)[0] for own in here])
    bases: list[BaseModel] = []
    for (name, given), own, found in zip(by_name.items(), here, sizes, strict=True):
        source, size = str(given.model), found.bytes * options.replicas.least
        if size > memory.limit:
            raise LoadError(
                f"The model `{name}` needs {size_text(size)}, and the models may have "
                f"{size_text(memory.limit)} together. Give more with --models-memory, or have it take less "
                "with --kv-memory or --quantize."
            )
        opener = _Opener(own, on_progress if not bases else None, adapter_store, secret)
        engine = OnDemandEngine(name, size, opener, memory, options.keep_alive)
        bases.append(BaseModel(name, source, own, engine, found.max_model_len))
        _log.info("%s (%s) needs %s", name, source, size_text(size))
    about = f"{len(bases)} models within {size_text(memory.limit)}"
    async with BaseModels(bases, memory).opened(about) as opened:
        yield opened


async def _on_disk(options: ServeOptions) -> ServeOptions:
    """The options with what is on the Hub downloaded."""
    if not names_the_hub(options):
        return options
    return await to_thread.run_sync(on_disk, options, abandon_on_cancel=True)


@dataclass
class _Opener:
    """Opens the engine of a model. `on_progress` is called for its first start only."""

    options: ServeOptions
    on_progress: Progress | None
    adapter_store: Path | None
    secret: bytes | None

    def __call__(self) -> AbstractAsyncContextManager[Opened]:
        progress, self.on_progress = self.on_progress, None
        return open_engine(self.options, progress, adapter_store=self.adapter_store, secret=self.secret)
