"""What all requests of a server share: the engine, the stores, the limits, the metrics."""

import hashlib
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

import personae
from personae.actors.client import EngineClient
from personae.api.console.history import LiveHistory
from personae.api.console.kept import KeptAnswer
from personae.api.eval_reports.runner import EvalRunner
from personae.api.family import Family
from personae.api.mcp.session import load_library
from personae.api.mcp.use import McpUse
from personae.api.sessions.store import SessionStore
from personae.api.settings import ApiSettings
from personae.api.telemetry.metrics import Metrics
from personae.api.telemetry.tracing import UNTRACED, Tracing
from personae.api.tenants.bodies import BodyBudget
from personae.api.tenants.budgets import Budgets
from personae.api.tenants.limits import Meter
from personae.api.tenants.prices import Prices
from personae.api.tenants.revocations import Revocations
from personae.api.tenants.store import DEFAULT_TENANT
from personae.api.tenants.workers import Workers

if TYPE_CHECKING:
    from personae.actors.replicas.scaling import ReplicaScaler
    from personae.api.adapters.registry import Registry
    from personae.api.base_models.base_models import BaseModels
    from personae.api.responses.store import ResponseStore
    from personae.api.tenants.store import TenantStore
    from personae.api.tenants.usage import UsageLedger


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of a server that its requests use. None is a part that the server does not have.

    `registry` has the adapters that were added while the server runs. `tenants` are those who may send
    requests, `usage` records what they use, and `budgets` bounds what they use in a day. `revocations` ends
    what runs for a revoked key. `responses` are the stored ones, `sessions` has what is known of sessions.
    `evals` runs evaluations.
    `scaler` adds and removes engines. `live` is the last answer of `/v1/stats`. `mcp` counts the
    requests that use MCP servers. `base_models` has all bases of a server with several; `client`, `settings`,
    `family` and `fingerprint` are those of one of them.
    `fingerprint` changes when the server could answer differently than before.
    """

    client: EngineClient
    settings: ApiSettings
    family: Family
    fingerprint: str
    metrics: Metrics
    meter: Meter
    revocations: Revocations
    sessions: SessionStore
    tracing: Tracing = UNTRACED
    workers: Workers = field(default_factory=Workers)
    bodies: BodyBudget = field(default_factory=BodyBudget)
    live: KeptAnswer = field(default_factory=KeptAnswer)
    history: LiveHistory = field(default_factory=LiveHistory)
    mcp: McpUse = field(default_factory=McpUse)
    registry: "Registry | None" = None
    tenants: "TenantStore | None" = None
    usage: "UsageLedger | None" = None
    budgets: Budgets | None = None
    responses: "ResponseStore | None" = None
    scaler: "ReplicaScaler | None" = None
    base_models: "BaseModels | None" = None
    evals: EvalRunner | None = None

    def of_base(self, client: EngineClient, settings: ApiSettings) -> "Services":
        """The same for another base of the server. Raises ModelLoadError as `make_services` does."""
        return replace(
            self,
            client=client,
            settings=settings,
            family=Family.of(client.tokenizer, settings.tool_format, settings.reasoning_format),
            fingerprint=_fingerprint(client, settings),
        )


def make_services(
    client: EngineClient,
    settings: ApiSettings,
    *,
    registry: "Registry | None" = None,
    tracing: Tracing = UNTRACED,
    tenants: "TenantStore | None" = None,
    usage: "UsageLedger | None" = None,
    responses: "ResponseStore | None" = None,
    scaler: "ReplicaScaler | None" = None,
    sessions: SessionStore | None = None,
    base_models: "BaseModels | None" = None,
) -> Services:
    """The services of an open engine.

    Raises ModelLoadError if the model's chat template cannot be compiled, or a format is unknown.
    """
    base = next(iter(client.models(DEFAULT_TENANT)))
    services = Services(
        client,
        settings,
        family=Family.of(client.tokenizer, settings.tool_format, settings.reasoning_format),
        fingerprint=_fingerprint(client, settings),
        metrics=Metrics(client, base, settings.max_adapters, registry, settings.tenant_metrics),
        meter=Meter(time.monotonic),
        revocations=Revocations(tenants),
        sessions=SessionStore(settings.session_ttl) if sessions is None else sessions,
        tracing=tracing,
        registry=registry,
        tenants=tenants,
        usage=usage,
        budgets=None if usage is None else Budgets(usage, Prices(settings.price)),
        responses=responses,
        scaler=scaler,
        base_models=base_models,
        evals=None if settings.eval_reports is None else EvalRunner(settings.eval_reports),
    )
    if settings.mcp_server:
        load_library()
    if base_models is not None:
        base_models.begin(services)
    return services


def _fingerprint(client: EngineClient, settings: ApiSettings) -> str:
    """A fingerprint of everything that determines an answer besides the request: model, options, program
    version."""
    bases = [card for card in client.models(DEFAULT_TENANT).values() if card.adapter is None]
    facts = (personae.__version__, bases, settings.about, client.max_model_len, client.vocab_size)
    return f"fp_{hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:12]}"
