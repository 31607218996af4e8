"""What the console's page Live is drawn from: some of the metrics, and what metrics have no place for."""

import time
from collections import defaultdict
from collections.abc import Iterator

import msgspec
from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response

from personae.actors.client import EngineStats
from personae.actors.replicas.scaling import ReplicaInfo, Status
from personae.api.exchange import exchange_of
from personae.api.http.operation import operation
from personae.api.respond import encode_json
from personae.api.services import Services
from personae.engine.stats import StepSample

MOST_QUEUES = 50

_LEFT_OUT = "_created"  # when a metric began
DRAWN = frozenset(
    {
        "personae:adapter_evictions",
        "personae:adapter_host_bytes",
        "personae:adapter_loads",
        "personae:adapters_held",
        "personae:adapters_in_line",
        "personae:engine_restarts",
        "personae:backlog_seconds",
        "personae:jumped_tokens",
        "personae:ready",
        "personae:steps",
        "vllm:generation_tokens",
        "vllm:inter_token_latency_seconds",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:prefix_cache_hits",
        "vllm:prefix_cache_queries",
        "vllm:prompt_tokens",
        "vllm:request_success",
        "vllm:time_to_first_token_seconds",
    }
)
"""The metrics of which `console/static/live.js` draws something."""
CHARTED = (
    "vllm:generation_tokens",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_",
    "vllm:prefix_cache_",
    "vllm:prompt_tokens",
    "vllm:request_success",
    "vllm:time_to_first_token_seconds_bucket",
)
"""Prefixes of the metrics that `point` in `console/static/live.js` reads."""
_ADDED_UP = "model_name"
"""A label of which only the sum is drawn: there may be hundreds of names."""


class LiveSample(msgspec.Struct, frozen=True):
    """A number with its labels, as `/metrics` has it, except that all models are one."""

    labels: dict[str, str]
    value: float


class LiveQueue(msgspec.Struct, frozen=True):
    """A tenant's sequences of one adapter (null: the base). `tokens` are those of prompts and answers so far;
    they only grow."""

    tenant: str
    adapter: str | None
    running: int
    waiting: int
    tokens: int


class LiveEngine(msgspec.Struct, frozen=True):
    """An engine and its last `steps`, the newest at the end. Each step is an array: the number of the
    engine's start, rows, tokens, seconds, and seconds that the device was idle before it."""

    id: str
    status: Status
    running: int
    waiting: int
    restarts: int
    kv_pages: int
    kv_pages_used: int
    kv_pages_lent: int
    steps: tuple[StepSample, ...]
    error: str | None = None


class LiveMetrics(msgspec.Struct, frozen=True):
    """Samples by the names that they have in `/metrics`, at a Unix time in seconds. `queues` are those with
    most sequences, then those with most tokens; there may be `max_replicas` engines."""

    samples: dict[str, list[LiveSample]]
    engines: list[LiveEngine]
    queues: list[LiveQueue]
    max_replicas: int
    at: float
    object: str = "stats"


class LiveSamples(msgspec.Struct, frozen=True):
    """The samples that the charts need, at a Unix time in seconds."""

    samples: dict[str, list[LiveSample]]
    at: float


class LiveHistoryList(msgspec.Struct, frozen=True):
    """The last hour, the oldest first."""

    data: list[LiveSamples]
    object: str = "list"


@operation("GET", "/v1/stats/history", answers={200: LiveHistoryList}, admin=True)
async def get_history(request: Request) -> Response:
    """Show the samples of the last hour, one a minute: what the console draws when it is opened."""
    return Response(exchange_of(request).services.history.body(), media_type="application/json")


def history_sample(services: Services) -> bytes:
    """What `LiveHistory.add` takes: the numbers of the charts."""
    found = {name: values for name, values in _samples(services).items() if name.startswith(CHARTED)}
    return encode_json({"samples": found})[:-1]


@operation("GET", "/v1/stats", answers={200: LiveMetrics}, admin=True)
async def get_stats(request: Request) -> Response:
    """Show what the server does now, as JSON: what the console draws. An answer may be a second old."""
    services = exchange_of(request).services
    body = services.live.body(lambda: encode_json(_metrics(services)))
    return Response(body, media_type="application/json")


def _metrics(services: Services) -> LiveMetrics:
    stats = services.client.stats()
    most = 1 if services.scaler is None else services.scaler.most
    engines, queues = list(_engines(services, stats)), _queues(services, stats)
    return LiveMetrics(_samples(services), engines, queues, most, time.time())


def _samples(services: Services) -> dict[str, list[LiveSample]]:
    found: dict[str, list[LiveSample]] = {}
    for family in services.metrics.live():
        if family.name in DRAWN:
            found |= _added_up(family)
    return found


def _added_up(family: Metric) -> dict[str, list[LiveSample]]:
    """The samples of a family, all models in one."""
    sums: dict[str, dict[frozenset[tuple[str, str]], float]] = defaultdict(lambda: defaultdict(float))
    for sample in family.samples:
        if not sample.name.endswith(_LEFT_OUT):
            labels = frozenset(each for each in sample.labels.items() if each[0] != _ADDED_UP)
            sums[sample.name][labels] += sample.value
    return {
        name: [LiveSample(dict(labels), value) for labels, value in values.items()]
        for name, values in sums.items()
    }


def _engines(services: Services, stats: EngineStats) -> Iterator[LiveEngine]:
    if services.scaler is None:
        status: Status = "ready" if stats.ready else "starting"
        info = ReplicaInfo(0, status, stats.running, stats.waiting, max(stats.restarts, 0))
        yield _engine(info, stats)
        return
    for info in services.scaler.list():
        yield _engine(info, stats.replicas.get(info.id, EngineStats(ready=False)))


def _engine(info: ReplicaInfo, stats: EngineStats) -> LiveEngine:
    return LiveEngine(
        str(info.id),
        info.status,
        info.running,
        info.waiting,
        info.restarts,
        stats.pages_total,
        stats.pages_used,
        stats.pages_lent,
        stats.recent_steps,
        info.error,
    )


def _queues(services: Services, stats: EngineStats) -> list[LiveQueue]:
    most = sorted(stats.queues, key=lambda one: (-one.running - one.waiting, -one.tokens))[:MOST_QUEUES]
    return [
        LiveQueue(
            each.tenant,
            None if each.adapter is None else services.metrics.adapter_name(each.adapter),
            each.running,
            each.waiting,
            each.tokens,
        )
        for each in most
    ]
