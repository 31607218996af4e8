"""`personae serve`, after its options are read: open the engine, serve it, close it."""

import gc
import ipaddress
import logging
import re
import socket
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing, contextmanager, nullcontext
from pathlib import Path

import anyio
import msgspec

from personae.actors.kit.event_loop import loop_options
from personae.actors.kit.gc_tuning import spare_what_is_here
from personae.actors.kit.switch_interval import shorten_switch_interval
from personae.api.adapters.checker import AdapterChecker, ProcessChecker, ThreadChecker
from personae.api.adapters.keep_loaded import KeptLoaded
from personae.api.adapters.registry import KEPT_VERSIONS, Registry
from personae.api.app import create_app
from personae.api.base_models.names import named_models
from personae.api.batches.manager import BatchManager
from personae.api.commands.startup import StartUp
from personae.api.commands.tracing import tracing_to
from personae.api.console.live import history_sample
from personae.api.family import Family, check_formats
from personae.api.http.address import bind, url
from personae.api.http.server import HttpServer, allow_open_files
from personae.api.http.tls import Certificate
from personae.api.hub.resolve import names_the_hub, on_disk
from personae.api.local import open_engine
from personae.api.opened import Opened, serve_settings
from personae.api.options import ServeOptions
from personae.api.params import sampling_defaults
from personae.api.responses.background import BackgroundResponses
from personae.api.responses.store import ResponseStore
from personae.api.sessions.store import SessionStore
from personae.api.telemetry import logs
from personae.api.telemetry.write_metrics import WriteFailureCollector
from personae.api.tenants.data import DataDir, serving
from personae.api.tenants.store import DEFAULT_TENANT, TenantStore
from personae.api.tenants.usage import UsageLedger
from personae.errors import EngineLost, LoadError, PersonaeError

logger = logging.getLogger(__name__)

LOST_SECONDS = 5.0  # for load balancers to notice that a server has lost its engine


def run(options: ServeOptions, start_up: StartUp) -> None:
    """Serve until a signal to stop, and show the start. Raises LoadError if the address, the model or an
    adapter is refused, or if other machines could reach a server without keys; EngineLost if the engine fails
    permanently."""
    gc.freeze()  # what was imported; the collection when the server is ready need not visit it
    logs.configure(options.log_format, options.log_level, start_up)
    allow_open_files()
    if (key := options.api_key) is not None and not re.fullmatch("[!-~]+", key):
        raise LoadError("--api-key must be printable ASCII without blanks.")
    check_formats(options.tool_format, options.reasoning_format)
    certificate = certificate_of(options)
    with (
        bind(options.host, options.port) as listener,
        serving(
            options.data_dir, options.database_url, options.object_store, options.adapter_cache_size
        ) as data,
    ):
        tenants = TenantStore(data, options.api_key)
        local = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
        if not local and not tenants.has_keys() and not options.insecure_no_auth:
            folder = options.data_dir or "DIR"
            raise LoadError(
                f"There are no API keys, so {options.host} would be open to everybody who reaches it. "
                "Make one, and serve from where it is kept:\n"
                f"  personae tenants create me --data-dir {folder}\n"
                f"  personae keys create me --admin --data-dir {folder}\n"
                f"  personae serve --host {options.host} --data-dir {folder} …\n"
                "Or give one as PERSONAE_SERVER_KEY, listen on 127.0.0.1, or say --insecure-no-auth."
            )
        named = ", ".join(named_models(options.models)) or options.model or "the default model"
        logger.info("loading %s", named)
        if names_the_hub(options):
            start_up.begin("download", drawn=False)
            options = on_disk(options)
            start_up.begin("libraries")  # of the engine's process, which loads them meanwhile
        anyio.run(
            _serve, options, listener, data, tenants, start_up, certificate, backend_options=loop_options()
        )
        logger.info("stopped")


def certificate_of(options: ServeOptions) -> Certificate | None:
    """The certificate to serve with; None without TLS. Raises LoadError."""
    if options.ssl_certfile is not None:
        return Certificate(options.ssl_certfile, options.ssl_keyfile)
    if options.ssl_keyfile is not None:
        raise LoadError("--ssl-keyfile needs --ssl-certfile.")
    return None


async def serve_until_lost(server: HttpServer, listener: socket.socket, opened: Opened) -> None:
    """Serve until a signal to stop. If the engine fails permanently, report it for a while, then raise
    EngineLost."""
    lost = False
    failure: PersonaeError | None = None

    async def watch() -> None:
        nonlocal lost
        await opened.lost()
        lost = True
        await anyio.sleep(LOST_SECONDS)
        server.stop()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        try:
            await server.serve(sockets=[listener])
        except PersonaeError as error:
            failure = error  # not in a group: the exit code depends on it
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if lost:
        raise EngineLost("The engine failed too often and was not started again; its last words are above.")


async def _serve(
    options: ServeOptions,
    listener: socket.socket,
    data: DataDir,
    tenants: TenantStore,
    start_up: StartUp,
    certificate: Certificate | None,
) -> None:
    scheme = "http" if certificate is None else "https"
    async with AsyncExitStack() as stack:
        tracing, traced = stack.enter_context(tracing_to(options.otlp_traces_endpoint))
        engine: AbstractAsyncContextManager[Opened]
        lasting = options.data_dir is not None
        secret = data.secret if lasting else None  # of a folder for this run only: pages outlive it
        if options.models:
            from personae.api.base_models.open import open_base_models  # one model needs none of it

            engine = open_base_models(options, start_up.begin, adapter_store=data.adapters, secret=secret)
        else:
            engine = open_engine(
                options,
                start_up.begin,
                adapter_store=data.adapters,
                secret=secret,
                engine_folder=data.path / "engines" if lasting else None,
            )
        opened = await stack.enter_async_context(engine)
        start_up.begin("server")
        client = opened.client
        models = client.models(DEFAULT_TENANT)
        base = next(iter(models))
        adapters = sum(card.adapter is not None for card in models.values())

        def on_ready() -> None:
            spare_what_is_here()
            shorten_switch_interval()
            start_up.end()
            print(f"personae ready {url(listener, scheme)} model={base} adapters={adapters}", flush=True)  # noqa: T201  the answer to the command
            logger.info("the console is at %s/", url(listener, scheme))

        settings = serve_settings(options, opened)
        checker = ThreadChecker() if options.one_process else ProcessChecker()
        with (
            registry_of(opened, data, checker, options.adapter_versions) as registry,
            closing(BatchManager(data, tenants, lasting=lasting)) as batches,
            UsageLedger(data).running() as usage,
            ResponseStore(data).running() as stored,
            SessionStore(settings.session_ttl, data=data).running() as sessions,
        ):
            app = create_app(
                client,
                settings,
                tenants=tenants,
                registry=registry,
                batches=batches,
                tracing=tracing,
                usage=usage,
                stored=stored if options.store_responses else None,
                scaler=opened.scaler,
                sessions=sessions,
                base_models=opened.base_models,
            )
            app.state.services.metrics.registry.register(WriteFailureCollector(data.failures))
            _log_start(opened, app.state.services.family, options.data_dir, data.shared)
            named = options.default_model
            if named is not None and named not in models:
                known = registry is not None and registry.find(DEFAULT_TENANT, named) is not None
                if not known:
                    logger.warning("there is no model %r yet, which is to be the default", named)
            server = HttpServer(
                traced(app),
                settings,
                drain_seconds=options.drain_timeout,
                on_ready=on_ready,
                end_all=opened.end_all,
                describe=opened.describe,
                certificate=certificate,
            )
            background = BackgroundResponses(stored).runs(app)
            async with (
                batches.running(app.state.services),
                background if options.store_responses else nullcontext(),
                app.state.services.revocations.running(),
                KeptLoaded(app.state.services).running(),
                nullcontext() if app.state.services.evals is None else app.state.services.evals.running(),
                app.state.services.history.running(lambda: history_sample(app.state.services)),
            ):
                await serve_until_lost(server, listener, opened)


def _log_start(opened: Opened, family: Family, data_dir: Path | None, shared: bool) -> None:
    """Log what was started."""
    tools, reasoning = (format.name if format else "none" for format in (family.tools, family.reasoning))
    templates = [one for one in (family.template, family.tool_template) if one is not None]
    if family.tools and templates and all(one.traits.tools == "described" for one in templates):
        tools += " (the server describes tools in the system message)"
    if opened.about:
        logger.info("the engine: %s", opened.about)
    sampling = msgspec.structs.asdict(sampling_defaults(opened.defaults))
    logger.info("sampling by default: %s", ", ".join(f"{name} {value:g}" for name, value in sampling.items()))
    kept = f"data in {data_dir}" if data_dir else "no data directory"
    if shared:
        kept += " and in the database"
    logger.info("tool format %s, reasoning format %s, %s", tools, reasoning, kept)


@contextmanager
def registry_of(
    opened: Opened, data: DataDir, checker: AdapterChecker | None = None, kept_versions: int = KEPT_VERSIONS
) -> Iterator[Registry | None]:
    """The registry for an engine whose bounds are known; `checker` checks uploads. Of each adapter
    `kept_versions` earlier ones are kept."""
    if opened.bounds is None:
        yield None
        return
    models = opened.client.models(DEFAULT_TENANT)
    registry = Registry(data, next(iter(models)), set(models), opened.bounds, checker, kept_versions)
    try:
        yield registry
    finally:
        registry.close()
