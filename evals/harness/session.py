"""One session of `personae eval run`: from options to results and report."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
from rich.console import Console

from personae import __version__
from personae.errors import RequestError
from personae.evals.harness.progress import Board
from personae.evals.harness.records import Head, Log, key_of, now
from personae.evals.harness.runner import choose_models, plan, run
from personae.evals.harness.target import (
    Target,
    TargetModel,
    names_of,
    open_in_process,
    open_server,
    source_of,
)
from personae.evals.served import Served
from personae.evals.suites.registry import Settings, default_suites, open_suite, suite_type


class EvalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a run. Without `url` the target is our own engine: in this process, or with `serve` in a
    server started for the run. Without `suites` the served models decide which suites run. `settings` are
    those of suites, as {"suite.name": text}."""

    suites: tuple[str, ...]
    out: Path
    name: str = ""
    url: str | None = None
    key: str | None = None
    serve: bool = False
    model: Path | None = None
    adapters: tuple[Path, ...] = ()
    models: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    settings: dict[str, str] = {}
    count: int | None = None
    concurrency: int = 16
    seed: int = 0
    repeat: int = 1
    temperature: float = 0.0
    timeout: float = 600.0
    resume: bool = False


async def run_session(options: EvalOptions, console: Console) -> Path:
    """Play everything that has not been played, and return the folder. The folder is created when there is
    something to write. If the session is interrupted, it keeps the results so far, and a message says so.

    Raises RequestError for options that make no sense, LoadError if our own engine does not start.
    """
    chosen: dict[str, Settings] = {name: {} for name in options.suites}
    chosen = chosen or default_suites(await _served(options))
    settings = {name: suite_settings(name, options, defaults) for name, defaults in chosen.items()}
    suites = {name: open_suite(name, settings[name]) for name in chosen}
    unknown = {key.partition(".")[0] for key in options.settings} - set(suites)
    if unknown:
        raise RequestError(f"`--set` names {', '.join(sorted(unknown))}, which is not run.", param="set")
    async with open_target(options) as target:
        served = await target.models()
        models = choose_models(served, options.models)
        seeds = range(options.seed, options.seed + options.repeat)
        plans = [
            plan(
                name,
                suite,
                _asked(models, served, settings[name]),
                modes=options.modes,
                tasks=options.tasks,
                seeds=seeds,
            )
            for name, suite in suites.items()
        ]
        if not any(one.plays for one in plans):
            raise RequestError("There is nothing to run: no case fits these models, modes and tasks.")
        sampling = {"temperature": options.temperature}
        head = Head(
            name=options.name or options.out.resolve().name,
            target=target.about,
            suites=settings,
            tasks={one.name: one.tasks for one in plans},
            models=[model.name for model in models],
            sampling={**sampling, "seed": options.seed, "repeat": options.repeat},
            version=__version__,
            started=now(),
            base=next((model.name for model in models if model.base), ""),
            plays=sum(len(one.plays) for one in plans),
        )
        begun = time.monotonic()
        complete = False
        with Log(options.out, head, resume=options.resume) as log:
            try:
                with Board(console) as board:
                    for one in plans:
                        keys = {one.key(play) for play in one.plays}
                        done = [record for record in log.records if key_of(record) in keys]
                        board.begin(one.name, len(keys), done)
                    for one in plans:
                        await run(
                            one,
                            target,
                            log,
                            sampling=sampling,
                            concurrency=options.concurrency,
                            on_record=board.count,
                        )
                complete = True
            finally:
                for one in plans:
                    one.suite.close()
                log.end(round(time.monotonic() - begun, 3), complete=complete)
                if not complete:
                    kept = f"{len(log.records)} outcomes are in {options.out}"
                    console.print(f"{kept}; the same command with --resume goes on.", highlight=False)
    return options.out


def suite_settings(name: str, options: EvalOptions, defaults: Settings) -> Settings:
    """The settings of one suite. `count` applies to every suite that has such a setting."""
    prefix = f"{name}."
    own = {key.removeprefix(prefix): text for key, text in options.settings.items() if key.startswith(prefix)}
    fields = {field.name for field in msgspec.structs.fields(suite_type(name).settings)}
    if options.count is not None and "count" in fields:
        own = {"count": str(options.count), **own}
    return defaults | own


def _asked(models: list[TargetModel], served: list[TargetModel], settings: Settings) -> list[TargetModel]:
    """The models that one suite uses: its setting chooses among those of the run. Raises RequestError."""
    names = [name for name in settings.get("models", "").split(",") if name]
    own = choose_models(served, names) if names else models
    return [model for model in models if model in own]


async def _served(options: EvalOptions) -> list[str]:
    """The names of the target's models, before our own engine is started."""
    if options.url is None:
        return names_of(options.model, options.adapters)
    async with open_server(options.url, options.key, options.timeout) as server:
        return [model.name for model in await server.models()]


@asynccontextmanager
async def open_target(options: EvalOptions) -> AsyncIterator[Target]:
    """The target that the options name. Raises LoadError or RequestError."""
    if options.url is not None:
        if options.serve or options.model is not None or options.adapters:
            raise RequestError(
                "`--url` is a server that runs; `--serve` and `--model` would start another.", param="url"
            )
        async with open_server(options.url, options.key, options.timeout) as server:
            yield server
    elif options.serve:
        arguments = [] if options.model is None else [str(options.model)]
        for folder in options.adapters:
            arguments += ["--adapters", str(folder)]
        options.out.mkdir(parents=True, exist_ok=True)
        served = Served(arguments, options.out / "server.log")
        await anyio.to_thread.run_sync(served.__enter__)
        try:
            async with open_server(served.url, patience=options.timeout) as server:
                server.about = f"personae serve {options.model.name if options.model else ''}".rstrip()
                server.source = source_of(options.model, options.adapters)
                yield server
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(served.__exit__)
    else:
        async with open_in_process(options.model, options.adapters) as target:
            yield target
