"""The HTTP application: which route goes where."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from personae.actors.client import EngineClient
from personae.api import routes
from personae.api.chat import chat_completions
from personae.api.chat_template import ChatTemplate
from personae.api.completions import completions
from personae.api.errors import http_error, personae_error
from personae.api.generation import TENANT, Door
from personae.api.metrics import Metrics
from personae.api.middleware import Gate
from personae.api.settings import ApiSettings
from personae.errors import PersonaeError


def make_door(client: EngineClient, settings: ApiSettings) -> Door:
    """What the routes need of an open engine.

    Raises ModelLoadError when the model's chat template cannot be compiled.
    """
    base = next(iter(client.models(TENANT)))
    metrics = Metrics(client, base, settings.max_adapters)
    tokenizer = client.tokenizer
    template = None
    if tokenizer.chat_template is not None:
        template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    return Door(client, settings, metrics, template)


def create_app(client: EngineClient, settings: ApiSettings | None = None) -> Starlette:
    """The OpenAI-compatible API of an open engine; an ASGI app for any server, or for tests.

    Raises ModelLoadError when the model's chat template cannot be compiled.
    """
    settings = settings or ApiSettings()
    door = make_door(client, settings)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", routes.list_models, methods=["GET"]),
            Route("/v1/models/{id:path}", routes.get_model, methods=["GET"]),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/detokenize", routes.detokenize, methods=["POST"]),
            Route("/health", routes.health, methods=["GET"]),
            Route("/ready", routes.ready, methods=["GET"]),
            Route("/version", routes.version, methods=["GET"]),
            Route("/metrics", routes.metrics, methods=["GET"]),
        ],
        middleware=[Middleware(Gate, settings=settings, metrics=door.metrics)],
        exception_handlers={PersonaeError: personae_error, HTTPException: http_error},
    )
    app.router.redirect_slashes = False
    app.state.door = door
    return app
