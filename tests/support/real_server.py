"""The whole product on a loopback port: engine, actors, API, uvicorn with uvloop, in a thread of its own."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

import uvloop
from patience import PATIENCE, eventually

from personae.actors.client import EngineClient
from personae.api.app import create_app
from personae.api.batches.manager import BatchManager
from personae.api.commands.serve import registry_of
from personae.api.http.address import bind, url
from personae.api.http.server import HttpServer
from personae.api.local import open_engine
from personae.api.options import ServeOptions
from personae.api.responses.store import ResponseStore
from personae.api.settings import ApiSettings
from personae.api.tenants.data import serving as data_dir
from personae.api.tenants.store import TenantStore
from personae.api.tenants.usage import UsageLedger


@dataclass
class Running:
    """A served engine: its URL, and the client that its API holds."""

    url: str
    client: EngineClient


@contextmanager
def running(options: ServeOptions) -> Iterator[Running]:
    """Serve while the block runs."""
    listening = threading.Event()
    listener = bind("127.0.0.1", 0)
    found: dict[str, object] = {}

    async def serve() -> None:
        with data_dir(None) as data, closing(BatchManager(data)) as batches, ExitStack() as uploads:
            async with open_engine(options, adapter_store=data.adapters) as opened:
                found["client"] = opened.client
                settings = ApiSettings(
                    defaults=opened.defaults,
                    max_adapters=opened.max_adapters,
                    tenant_metrics=options.tenant_metrics,
                )
                tenants = TenantStore(data)
                registry = uploads.enter_context(registry_of(opened, data))
                app = create_app(
                    opened.client,
                    settings,
                    tenants=tenants,
                    registry=registry,
                    batches=batches,
                    usage=uploads.enter_context(UsageLedger(data).running()),
                    stored=uploads.enter_context(ResponseStore(data).running()),
                )
                server = HttpServer(app, settings, on_ready=listening.set)
                found["server"] = server
                async with batches.running(app.state.services):
                    await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: uvloop.run(serve()), daemon=True)
    thread.start()
    try:
        eventually(lambda: listening.is_set() or not thread.is_alive(), "the server starts")
        assert listening.is_set(), "the server did not start"
        yield Running(url(listener), found["client"])
    finally:
        if "server" in found:
            found["server"].should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the server did not stop"
