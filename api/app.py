"""The HTTP application: its routes and its middleware."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from personae.actors.client import EngineClient
from personae.actors.replicas.scaling import ReplicaScaler
from personae.api import routes
from personae.api.adapters import alias_routes as aliases
from personae.api.adapters import routes as adapters
from personae.api.adapters.registry import Registry
from personae.api.anthropic import routes as anthropic
from personae.api.base_models.base_models import BaseModels
from personae.api.batches import routes as batch_routes
from personae.api.batches.manager import BatchManager
from personae.api.chat import chat_completions
from personae.api.completions import completions
from personae.api.console import check, live, pages
from personae.api.embeddings import routes as embeddings
from personae.api.eval_reports import routes as eval_reports
from personae.api.exchange import exchange_of
from personae.api.files import routes as files
from personae.api.http.middleware import Gate, Prefix
from personae.api.http.openapi import document
from personae.api.http.operation import Content, Operation, operation
from personae.api.replicas import routes as replica_routes
from personae.api.responses import conversation_routes as conversations
from personae.api.responses import routes as responses
from personae.api.responses.store import ResponseStore
from personae.api.services import Services, make_services
from personae.api.sessions import routes as session_routes
from personae.api.sessions.store import SessionStore
from personae.api.settings import ApiSettings
from personae.api.telemetry.tracing import UNTRACED, Tracing
from personae.api.tenants import routes as tenant_routes
from personae.api.tenants.access import Access
from personae.api.tenants.limits import RATE_HEADERS
from personae.api.tenants.store import TenantStore
from personae.api.tenants.usage import UsageLedger
from personae.api.wire.errors import http_error, personae_error
from personae.errors import PersonaeError


@operation("GET", "/openapi.json", answers={200: Content("application/json", dict[str, Any])})
async def openapi(request: Request) -> Response:
    """Describe this API."""
    return Response(_description(exchange_of(request).settings.root_path), media_type="application/json")


OPERATIONS = (
    chat_completions,
    check.check_request,
    completions,
    embeddings.create_embeddings,
    embeddings.score,
    embeddings.rerank,
    responses.create_response,
    responses.count_input_tokens,
    responses.get_response,
    responses.delete_response,
    responses.cancel_response,
    responses.list_input_items,
    conversations.create_conversation,
    conversations.get_conversation,
    conversations.change_conversation,
    conversations.delete_conversation,
    conversations.create_items,
    conversations.list_items,
    conversations.get_item,
    conversations.delete_item,
    session_routes.list_sessions,
    session_routes.get_session,
    session_routes.change_session,
    session_routes.delete_session,
    anthropic.create_message,
    anthropic.count_tokens,
    routes.list_models,
    routes.get_model,
    adapters.create_adapter,
    adapters.list_adapters,
    adapters.get_adapter,
    adapters.change_adapter,
    adapters.delete_adapter,
    adapters.list_versions,
    aliases.put_alias,
    aliases.list_aliases,
    aliases.get_alias,
    aliases.delete_alias,
    adapters.load_lora_adapter,
    adapters.unload_lora_adapter,
    files.create_file,
    files.list_files,
    files.get_file,
    files.get_content,
    files.delete_file,
    batch_routes.create_batch,
    batch_routes.list_batches,
    batch_routes.get_batch,
    batch_routes.cancel_batch,
    tenant_routes.create_tenant,
    tenant_routes.list_tenants,
    tenant_routes.get_tenant,
    tenant_routes.change_tenant,
    tenant_routes.delete_tenant,
    tenant_routes.create_key,
    tenant_routes.list_keys,
    tenant_routes.get_key,
    tenant_routes.change_key,
    tenant_routes.rotate_key,
    tenant_routes.delete_key,
    tenant_routes.get_usage,
    tenant_routes.get_account,
    replica_routes.list_replicas,
    replica_routes.scale_replicas,
    routes.tokenize,
    routes.detokenize,
    routes.health,
    routes.ready,
    routes.ping,
    routes.post_ping,
    routes.load,
    routes.version,
    routes.metrics,
    live.get_stats,
    live.get_history,
    eval_reports.start_eval,
    eval_reports.cancel_eval,
    eval_reports.compare_eval_reports,
    eval_reports.list_eval_reports,
    eval_reports.get_eval_report,
    eval_reports.get_eval_page,
    openapi,
    pages.home,
    pages.console,
    pages.docs,
    pages.console_file,
)
"""All routes."""


@cache
def _description(root_path: str) -> bytes:
    return msgspec.json.encode(document(OPERATIONS, root_path))


def _cross_origin(origins: tuple[str, ...]) -> list[Middleware]:
    """The outermost middleware, so that pages can read refusals, and their preflight requests need no key."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST", "PUT", "PATCH", "DELETE"),
            allow_headers=("*",),
            expose_headers=(
                "x-request-id",
                "request-id",
                "retry-after",
                *RATE_HEADERS,
                "x-personae-adapter",
                "x-personae-ignored",
                "x-personae-max-tokens",
                "x-personae-moved",
                "endpoint-load-metrics",
            ),
        )
    ]


def create_app(
    client: EngineClient,
    settings: ApiSettings | None = None,
    *,
    tenants: TenantStore | None = None,
    registry: Registry | None = None,
    batches: BatchManager | None = None,
    tracing: Tracing = UNTRACED,
    usage: UsageLedger | None = None,
    stored: ResponseStore | None = None,
    scaler: ReplicaScaler | None = None,
    sessions: SessionStore | None = None,
    base_models: BaseModels | None = None,
) -> Starlette:
    """The OpenAI-compatible API of an open engine; an ASGI app for any server, or for tests.

    Without `tenants`, no key is required. Without `usage` or `stored`, usage or responses are not stored;
    without `sessions` the list of sessions ends with the app. Without a `scaler`, the number of engines is
    fixed. With `base_models` there are several bases, and `client` is the first one's. Without a
    `registry`, adapters cannot be uploaded; without `batches`, files cannot. Batches run within
    `batches.running(app.state.services)`. Raises ModelLoadError if the model's chat template cannot be
    compiled, or a format is unknown.
    """
    settings = settings or ApiSettings()
    services = make_services(
        client,
        settings,
        registry=registry,
        tracing=tracing,
        tenants=tenants,
        usage=usage,
        responses=stored,
        scaler=scaler,
        sessions=sessions,
        base_models=base_models,
    )
    access = Middleware(
        Access,
        store=tenants,
        usage=usage,
        meter=services.meter,
        insecure=settings.insecure_no_auth,
        origins=settings.allowed_origin,
    )
    app = app_of(services, OPERATIONS, access)
    app.state.batches = batches
    return app


def app_of(services: Services, operations: Sequence[Operation], access: Middleware) -> Starlette:
    """The ASGI app of these routes; `access` finds the caller of each request."""
    settings = services.settings
    app = Starlette(
        routes=[each.route() for each in operations],
        middleware=[
            *([Middleware(Prefix, prefix=settings.root_path)] if settings.root_path else []),
            *_cross_origin(settings.allowed_origin),
            Middleware(Gate, settings=settings, metrics=services.metrics),
            access,
        ],
        exception_handlers={PersonaeError: personae_error, HTTPException: http_error},
    )
    app.state.error_forms = {each.path: each.error for each in operations if each.error is not None}
    app.router.redirect_slashes = False
    app.state.services = services
    app.state.background = None  # see `BackgroundResponses.runs`
    return app
