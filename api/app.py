"""The HTTP application: which route goes where."""

import time

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from personae.actors.client import EngineClient
from personae.api import routes
from personae.api.adapters import routes as adapters
from personae.api.adapters.registry import Registry
from personae.api.batches import routes as batch_routes
from personae.api.batches.desk import Batches
from personae.api.chat import chat_completions
from personae.api.completions import completions
from personae.api.errors import http_error, personae_error
from personae.api.family import Family
from personae.api.files import routes as files
from personae.api.generation import Door
from personae.api.metrics import Metrics
from personae.api.middleware import Gate
from personae.api.settings import ApiSettings
from personae.api.tenants.access import Access
from personae.api.tenants.limits import Meter
from personae.api.tenants.store import DEFAULT_TENANT, TenantStore
from personae.errors import PersonaeError


def make_door(
    client: EngineClient,
    settings: ApiSettings,
    registry: Registry | None = None,
    batches: Batches | None = None,
) -> Door:
    """What the routes need of an open engine.

    Raises ModelLoadError when the model's chat template cannot be compiled, or a format is not known.
    """
    base = next(iter(client.models(DEFAULT_TENANT)))
    metrics = Metrics(client, base, settings.max_adapters)
    family = Family.of(client.tokenizer, settings.tool_format, settings.reasoning_format)
    return Door(client, settings, metrics, family, Meter(time.monotonic), registry, batches)


def create_app(
    client: EngineClient,
    settings: ApiSettings | None = None,
    *,
    tenants: TenantStore | None = None,
    registry: Registry | None = None,
    batches: Batches | None = None,
) -> Starlette:
    """The OpenAI-compatible API of an open engine; an ASGI app for any server, or for tests.

    Without `tenants` nobody is asked for a key; without a `registry` no adapters can be uploaded, without
    `batches` no files; batches run within `batches.running(app.state.door)`. Raises ModelLoadError when the
    model's chat template cannot be compiled, or a format is not known.
    """
    settings = settings or ApiSettings()
    door = make_door(client, settings, registry, batches)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", routes.list_models, methods=["GET"]),
            Route("/v1/models/{id:path}", routes.get_model, methods=["GET"]),
            Route("/v1/adapters", adapters.create, methods=["POST"]),
            Route("/v1/adapters", adapters.list_adapters, methods=["GET"]),
            Route("/v1/adapters/{name}", adapters.get_adapter, methods=["GET"]),
            Route("/v1/adapters/{name}", adapters.delete_adapter, methods=["DELETE"]),
            Route("/v1/load_lora_adapter", adapters.load_lora_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", adapters.unload_lora_adapter, methods=["POST"]),
            Route("/v1/files", files.create, methods=["POST"]),
            Route("/v1/files", files.list_files, methods=["GET"]),
            Route("/v1/files/{id}", files.get_file, methods=["GET"]),
            Route("/v1/files/{id}", files.delete_file, methods=["DELETE"]),
            Route("/v1/files/{id}/content", files.get_content, methods=["GET"]),
            Route("/v1/batches", batch_routes.create, methods=["POST"]),
            Route("/v1/batches", batch_routes.list_batches, methods=["GET"]),
            Route("/v1/batches/{id}", batch_routes.get_batch, methods=["GET"]),
            Route("/v1/batches/{id}/cancel", batch_routes.cancel_batch, methods=["POST"]),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/detokenize", routes.detokenize, methods=["POST"]),
            Route("/health", routes.health, methods=["GET"]),
            Route("/ready", routes.ready, methods=["GET"]),
            Route("/version", routes.version, methods=["GET"]),
            Route("/metrics", routes.metrics, methods=["GET"]),
        ],
        middleware=[
            Middleware(Gate, settings=settings, metrics=door.metrics),
            Middleware(Access, store=tenants, meter=door.meter, insecure=settings.insecure),
        ],
        exception_handlers={PersonaeError: personae_error, HTTPException: http_error},
    )
    app.router.redirect_slashes = False
    app.state.door = door
    return app
