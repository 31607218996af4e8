"""Opens an engine: for `personae serve` with a separate process for the model, and for `personae.open`, as a
library, in one process."""

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

from anyio import to_thread

from personae.actors.adapter_folders import adapter_folders
from personae.actors.cluster.launch import open_cluster
from personae.actors.cluster.stage_machines import check_machines
from personae.actors.frontend.engine_process import Progress
from personae.actors.keeping import Keeper
from personae.actors.kv_publisher import publishing
from personae.actors.multi_process import MultiProcessEngine, open_multi_process
from personae.actors.options import ClusterOptions, EngineOptions
from personae.actors.replicas.launch import check_prefill, open_replicas
from personae.actors.replicas.scaling import HearKVEvents
from personae.api.bundled import bundled
from personae.api.hub.names import adapter_source
from personae.api.hub.resolve import names_the_hub, on_disk
from personae.api.opened import Opened
from personae.api.options import ONE_REPLICA, ServeOptions, shared
from personae.api.page_secret import kept_secret
from personae.engine.generation_config import GenerationDefaults
from personae.engine.object_stores import LMCACHE, MOONCAKE
from personae.errors import LoadError


@asynccontextmanager
async def open_engine(
    options: ServeOptions,
    on_progress: Progress | None = None,
    *,
    adapter_store: Path | None = None,
    secret: bytes | None = None,
    engine_folder: Path | None = None,
) -> AsyncIterator[Opened]:
    """Load the model and its adapters, start the actors, yield the engine, and stop everything in order.

    `adapter_store` is the folder of adapters that are added later, `secret` what tenants' prefix-cache salts
    are made from. With an `engine_folder`, engines on this machine outlive this process if it is killed, and
    those that wait in that folder are taken over (on Linux). A bundled model adds its own adapters to the
    requested ones. Models and adapters on the Hub are downloaded. `on_progress(phase, done, total)` is called
    for each phase, and with bytes while weights load; in one process, from another thread. Raises LoadError.
    """
    _check(options)
    if names_the_hub(options):
        options = await to_thread.run_sync(on_disk, options, abandon_on_cancel=True)
    if secret is None:
        evicts = options.kv_remote is not None and options.kv_remote.startswith((LMCACHE, MOONCAKE))
        secret, in_store = await kept_secret(options.kv_disk, None if evicts else options.kv_remote)
        if evicts and secret is None:
            raise LoadError(f"--kv-remote {options.kv_remote} needs --data-dir: it keeps what names pages.")
        if not in_store and not evicts:
            options = replace(options, kv_remote=None, kv_remote_bytes=None)
    if options.prefill_replicas:
        options = replace(options, kv_transfer=True)
    engine_options, recommended = engine_options_of(options, adapter_store, secret)
    if not options.one_process:
        with _publishing(options) as hear:
            keeper = None
            if engine_folder is not None and secret is not None and sys.platform == "linux":
                keeper = Keeper(engine_folder, secret, options.engine_grace)
            engines = _open_processes(options, engine_options, on_progress, hear, keeper)
            async with engines as engine_processes:
                opened = _opened(engine_processes)
                yield replace(opened, model=engine_options.model, defaults=recommended(opened.defaults))
        return
    from personae.actors.assembly import assemble  # it loads torch
    from personae.actors.in_process import open_in_process

    assembly = await to_thread.run_sync(assemble, engine_options, on_progress)
    async with open_in_process(assembly.engine_spec, max_restarts=options.max_restarts) as client:
        facts = (recommended(assembly.defaults), assembly.max_adapters, assembly.bounds)
        about, model = assembly.about, engine_options.model
        yield Opened(client, *facts, client.lost, client.end_all, client.describe, about, model=model)
    if assembly.engine_spec.tier is not None:
        await to_thread.run_sync(assembly.engine_spec.tier.close)


def _check(options: ServeOptions) -> None:
    """Raises LoadError for options that contradict each other."""
    if options.models:
        raise LoadError("`models` is for `personae serve`; a program opens one engine for each model.")
    if options.keep_alive is not None or options.models_memory is not None:
        given = "--models-memory" if options.keep_alive is None else "--keep-alive"
        raise LoadError(f"{given} needs --model NAME=MODEL.")
    if options.one_process and options.replicas != ONE_REPLICA:
        raise LoadError("--one-process has one engine; --replicas needs processes of their own.")
    if options.spare_process and (options.one_process or options.replicas != ONE_REPLICA or options.ray):
        raise LoadError(
            "--spare-process is for one engine in a process of its own on this machine; leave it out with "
            "--replicas, --ray and --one-process."
        )
    if options.nnodes > 1 and (options.replicas != ONE_REPLICA or options.ray is not None):
        raise LoadError("--nnodes is for one engine; leave it out with --replicas and --ray.")
    check_machines(options)
    check_prefill(options.prefill_replicas, options.replicas.least, options.replicas.most)
    if options.one_process and options.ray is not None:
        raise LoadError("--one-process has its engine here; --ray has engines on other machines.")
    if options.one_process and options.kv_events is not None:
        raise LoadError("--kv-events needs an engine process; leave out --one-process.")
    for name in ("kv_disk", "kv_remote"):
        if getattr(options, name) is None and getattr(options, f"{name}_bytes") is not None:
            given = f"--{name.replace('_', '-')}"
            raise LoadError(f"{given}-bytes needs {given}.")
    if options.kv_transfer_backend != "sockets" and not (options.kv_transfer or options.prefill_replicas):
        raise LoadError(f"--kv-transfer-backend {options.kv_transfer_backend} needs --kv-transfer.")


def _opened(engine_processes: MultiProcessEngine) -> Opened:
    client = engine_processes.client
    return Opened(
        client,
        engine_processes.defaults,
        engine_processes.max_adapters,
        engine_processes.bounds,
        client.lost,
        client.end_all,
        client.describe,
        engine_processes.about,
        engine_processes.scaler,
    )


@contextmanager
def _publishing(options: ServeOptions) -> Iterator[HearKVEvents | None]:
    """The publisher of the engines' KV events. None if they are not published. Raises LoadError."""
    if options.kv_events is None:
        if options.kv_events_replay is not None:
            raise LoadError("--kv-events-replay needs --kv-events.")
        yield None
        return
    with publishing(options.kv_events, options.kv_events_replay, options.kv_events_topic) as publisher:
        yield publisher.publish


def engine_options_of(
    options: ServeOptions, adapter_store: Path | None = None, secret: bytes | None = None
) -> tuple[EngineOptions, Callable[[GenerationDefaults], GenerationDefaults]]:
    """The options of an engine, and a function for its sampling defaults: it takes what the model's files
    recommend, and adds what we recommend. A bundled model brings its file, its adapters and its defaults.
    Models and adapters must be on this machine. Raises LoadError."""
    asked = shared(options, EngineOptions)
    model, (adapters, named) = options.model, _split(options.adapters)
    asked_for = adapter_folders(adapters, named)
    if (ours := bundled(model)) is not None:
        model = ours.model
        if options.bundled_adapters:
            others = adapter_folders(ours.adapters, ()).items()
            named = (*((name, folder) for name, folder in others if name not in asked_for), *named)
        asked["served_model_name"] = options.served_model_name or ours.name
        if options.dtype == "auto" and options.device != "cuda" and options.quantize is None:
            asked["dtype"] = ours.dtype
    assert model is not None
    asked["record_kv_events"] = options.kv_events is not None
    told = EngineOptions(model, adapters, adapter_store, secret, named_adapters=named, **asked)
    return told, (lambda read: read) if ours is None else ours.defaults


def _split(sources: tuple[Path, ...]) -> tuple[tuple[Path, ...], tuple[tuple[str, Path], ...]]:
    """The folders of adapters, and the adapters with a name of their own. Raises LoadError."""
    try:
        found = [adapter_source(each) for each in sources]
    except ValueError as error:
        raise LoadError(f"--adapters: {error}") from None
    places = [(name, place) for name, place in found if isinstance(place, Path)]
    return (
        tuple(place for name, place in places if name is None),
        tuple((name, place) for name, place in places if name is not None),
    )


def _open_processes(
    options: ServeOptions,
    engine_options: EngineOptions,
    on_progress: Progress | None,
    hear: HearKVEvents | None,
    keeper: Keeper | None,
) -> AbstractAsyncContextManager[MultiProcessEngine]:
    if options.ray is not None:
        return open_cluster(
            engine_options,
            ClusterOptions(**shared(options, ClusterOptions)),
            options.replicas.least,
            on_progress,
            most=options.replicas.most,
            max_restarts=options.max_restarts,
            hang_seconds=options.hang_timeout,
            silence_seconds=options.silence_timeout,
            prefill=options.prefill_replicas,
            by_load=not options.replicas.fixed,
        )
    if options.replicas == ONE_REPLICA:
        return open_multi_process(
            engine_options,
            on_progress,
            max_restarts=options.max_restarts,
            hang_seconds=options.hang_timeout,
            on_kv_events=hear,
            keeper=keeper,
            spare=options.spare_process,
        )
    return open_replicas(
        engine_options,
        options.replicas.least,
        on_progress,
        most=options.replicas.most,
        max_restarts=options.max_restarts,
        hang_seconds=options.hang_timeout,
        silence_seconds=options.silence_timeout,
        on_kv_events=hear,
        keeper=keeper,
        prefill=options.prefill_replicas,
        by_load=not options.replicas.fixed,
    )
