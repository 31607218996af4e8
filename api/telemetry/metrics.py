"""`/metrics`: what the server does, for Prometheus.

Names that begin with `vllm:` mean what they mean in vLLM, so that its dashboards and load balancers work
here. Other names begin with `personae:`. The engine's counts are read from it at each scrape.
"""

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from personae.actors.client import EngineClient
from personae.api.choices import Part
from personae.api.telemetry.adapter_metrics import AdapterCollector, RegisteredAdapters
from personae.api.telemetry.engine_metrics import EngineCollector
from personae.api.telemetry.merged import MergedCollector
from personae.api.telemetry.orca import load_header
from personae.api.telemetry.tenant_metrics import TenantMetrics
from personae.engine.sequence import LatencyTargets

_FIRST_TOKEN = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_PER_TOKEN = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
)
_REQUEST = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))
_CHOICES = (1, 2, 5, 10, 20)
_LABELS = ("model_name",)
_MAX_NAMES = 256  # label values that live as long as the process


class Metrics:
    """All metrics of one app, in a registry of its own. `adapters` are the registered ones. `tenants` is how
    many tenants have series of their own, 0 for none.
    """

    def __init__(
        self,
        client: EngineClient,
        model_name: str,
        max_adapters: int | None,
        adapters: RegisteredAdapters | None = None,
        tenants: int = 0,
    ) -> None:
        self.registry = CollectorRegistry()
        self._client = client
        self._names = {model_name}
        self._adapters = AdapterCollector(client, self.label, max_adapters, adapters)
        self._engines = MergedCollector(EngineCollector(client, model_name))
        self.tokens = TokenCollector()
        self._collectors = (self._engines, self._adapters, self.tokens)
        for collector in self._collectors:
            self.registry.register(collector)
        self.prompt_tokens = self._counter(
            "vllm:prompt_tokens", "Prompt tokens of accepted requests.", *_LABELS
        )
        self.success = self._counter(
            "vllm:request_success", "Sequences ended, by reason.", *_LABELS, "finished_reason"
        )
        self.first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST_TOKEN
        )
        self.per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per token after a sequence's first.",
            _PER_TOKEN,
        )
        self.request = self._histogram(
            "vllm:e2e_request_latency_seconds", "From a request's arrival to its sequence's end.", _REQUEST
        )
        self.queue = self._histogram(
            "vllm:request_queue_time_seconds", "From a sequence's admission to its first step.", _REQUEST
        )
        self.prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "From a sequence's first step to its first token.", _REQUEST
        )
        self.decode = self._histogram(
            "vllm:request_decode_time_seconds", "From a sequence's first token to its last.", _REQUEST
        )
        self.inference = self._histogram(
            "vllm:request_inference_time_seconds", "From a sequence's first step to its last token.", _REQUEST
        )
        self.prompt_length = self._histogram("vllm:request_prompt_tokens", "Tokens of prompts.", _TOKENS)
        self.answer_length = self._histogram("vllm:request_generation_tokens", "Tokens of answers.", _TOKENS)
        self.asked_choices = self._histogram(
            "vllm:request_params_n", "Answers asked for, per prompt.", _CHOICES
        )
        self.asked_tokens = self._histogram(
            "vllm:request_params_max_tokens", "The most tokens that answers may have.", _TOKENS
        )
        self.targets = self._counter(
            "personae:slo_requests",
            "Sequences with latency targets that ended, by whether they met all of them.",
            *_LABELS,
            "met",
        )
        self.versions = self._counter(
            "personae:adapter_version_requests",
            "Requests, by the exact version of an uploaded adapter and the alias that chose it.",
            "version",
            "alias",
        )
        self.in_flight = 0
        self.tenants = TenantMetrics(self.registry, tenants, _FIRST_TOKEN) if tenants else None
        self.http = self._counter(
            "personae:http_requests", "Answers, by route and status.", "method", "route", "status"
        )

    def add_engine(self, client: EngineClient, model_name: str) -> None:
        """Show one more engine, that of another base."""
        self._names.add(model_name)
        self._engines.add(EngineCollector(client, model_name))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, _LABELS, buckets=buckets, registry=self.registry)

    @contextmanager
    def answering(self, label: str, asked: Iterable[tuple[int, int]]) -> Iterator[None]:
        """Count a request as in progress while the block runs. `asked`: choices and `max_tokens` of each
        prompt."""
        for choices, tokens in asked:
            self.asked_choices.labels(label).observe(choices)
            self.asked_tokens.labels(label).observe(tokens)
        with self.counted():
            yield

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request as in progress while the block runs."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def load(self, wanted: bytes) -> bytes | None:
        """The engine's load as a header in the requested format. None if the format is unknown."""
        return load_header(wanted, self._client.stats())

    def label(self, model: str) -> str:
        """The model's name as a label. Tenants invent names, so beyond a limit they are all "other"."""
        if model not in self._names and len(self._names) < _MAX_NAMES:
            self._names.add(model)
        return model if model in self._names else "other"

    def adapter_name(self, digest: str) -> str:
        """A name by which requests ask for this adapter."""
        return self._adapters.names(digest)[0]

    def live(self) -> Iterator[Metric]:
        """The metrics of a page that refreshes every few seconds: a fraction of all, and cheaper."""
        for collector in self._collectors:
            yield from collector.collect()
        for shown in (self.prompt_tokens, self.success, self.first_token):
            yield from shown.collect()

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self.registry)


@dataclass(slots=True)
class TokenSeries:
    """The tokens of one model: how many, and the seconds between a sequence's, by bucket."""

    tokens: int = 0
    seconds: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * (len(_PER_TOKEN) + 1))

    def waited(self, seconds: float) -> None:
        """Count the time between two tokens."""
        self.seconds += seconds
        self.counts[bisect_left(_PER_TOKEN, seconds)] += 1


class TokenCollector(Collector):
    """The two metrics that change with every token. prometheus_client's own take a lock for each value that
    changes and look at the buckets one by one."""

    def __init__(self) -> None:
        self._series: dict[str, TokenSeries] = {}

    def of(self, label: str) -> TokenSeries:
        """The model's series."""
        return self._series.setdefault(label, TokenSeries())

    def collect(self) -> Iterator[Metric]:
        """Show all series."""
        generated = CounterMetricFamily("vllm:generation_tokens", "Tokens emitted.", labels=_LABELS)
        between = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "Between a sequence's tokens, as they come.", labels=_LABELS
        )
        bounds = [*(str(float(bound)) for bound in _PER_TOKEN), "+Inf"]
        for label, series in self._series.copy().items():
            generated.add_metric((label,), series.tokens)
            if any(series.counts):
                buckets = list(zip(bounds, accumulate(series.counts), strict=True))
                between.add_metric((label,), buckets, series.seconds)
        yield generated
        yield between


@dataclass(slots=True)
class SequenceClock:
    """Times one sequence and counts its tokens. `arrived` is its request's start by `time.perf_counter`.

    `began`, `first` and `last` are the times of its first step (as far as the engine reports it), its first
    token and its last. `reason` is why it ended, None until then. `targets` are the client's.
    """

    metrics: Metrics
    model: str
    arrived: float
    prompt: int
    targets: LatencyTargets | None = None
    tenant: str = ""
    began: float | None = None
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    reason: str | None = None
    _series: TokenSeries | None = None  # that every token goes to, once it is known

    def saw(self, part: Part) -> None:
        """Record a part as it arrives from the engine."""
        now = time.perf_counter()
        metrics, model = self.metrics, self.model
        if part.queued is not None:
            metrics.queue.labels(model).observe(part.queued)
            self.began = min(self.arrived + part.queued, now)
        if count := len(part.tokens):
            if (series := self._series) is None:
                series = self._series = metrics.tokens.of(model)
                self.first = now
                metrics.first_token.labels(model).observe(now - self.arrived)
                if metrics.tenants is not None:
                    metrics.tenants.first_token(self.tenant, now - self.arrived)
            else:
                series.waited((now - self.last) / count)
            self.last = now
            self.tokens += count
            series.tokens += count
        if part.finish is not None:
            self.end("stop" if part.finish == "tool_calls" else part.finish)

    def _in_time(self, targets: LatencyTargets) -> bool:
        """Whether it met the client's targets."""
        if not self.tokens or self.reason == "error":
            return False
        first, each = self.first - self.arrived, (self.last - self.first) / max(self.tokens - 1, 1)
        return targets.met(first, each)

    def ran(self) -> float:
        """Seconds from its first step to now, or to its last token if it has ended."""
        if self.began is None:
            return 0.0
        return max((self.last if self.reason is not None else time.perf_counter()) - self.began, 0.0)

    def end(self, reason: str) -> None:
        """The sequence has ended: "stop", "length", "abort" or "error". Only the first call counts."""
        if self.reason is not None:
            return
        self.reason = reason
        metrics, model = self.metrics, self.model
        if self.targets is not None and reason != "abort":
            metrics.targets.labels(model, "true" if self._in_time(self.targets) else "false").inc()
        metrics.success.labels(model, reason).inc()
        metrics.request.labels(model).observe(time.perf_counter() - self.arrived)
        metrics.prompt_length.labels(model).observe(self.prompt)
        metrics.answer_length.labels(model).observe(self.tokens)
        if self.tokens:
            metrics.decode.labels(model).observe(self.last - self.first)
            if self.began is not None:
                metrics.prefill.labels(model).observe(self.first - self.began)
                metrics.inference.labels(model).observe(self.last - self.began)
        if self.tokens > 1:
            metrics.per_token.labels(model).observe((self.last - self.first) / (self.tokens - 1))
