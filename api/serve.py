"""`personae serve`, after its options are read: open the engine, serve it, close it."""

import logging
import socket

import uvloop
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from personae.api.app import create_app
from personae.api.generation import TENANT
from personae.api.local import open_engine
from personae.api.options import ServeOptions
from personae.api.server import Server, bind, url
from personae.api.settings import ApiSettings


def run(options: ServeOptions, host: str, port: int) -> None:
    """Serve until told to stop. Raises LoadError when the address, the model or an adapter is refused."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with bind(host, port) as listener:
        uvloop.run(_serve(options, listener))


async def _serve(options: ServeOptions, listener: socket.socket) -> None:
    progress = Progress(
        TextColumn("loading"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    weights = progress.add_task("weights", total=None)

    def on_progress(done: int, total: int) -> None:
        progress.update(weights, completed=done, total=total)

    progress.start()
    try:
        async with open_engine(options, on_progress) as opened:
            progress.stop()
            client = opened.client
            models = client.models(TENANT)
            base = next(iter(models))

            def on_ready() -> None:
                print(f"personae ready {url(listener)} model={base} adapters={len(models) - 1}", flush=True)  # noqa: T201  the answer to the command

            settings = ApiSettings(
                defaults=opened.defaults, max_adapters=opened.max_adapters, seed=options.seed
            )
            app = create_app(client, settings)
            await Server(app, settings, on_ready=on_ready).serve(sockets=[listener])
    finally:
        progress.stop()
