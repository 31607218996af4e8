"""OpenTelemetry: a span for each request, below it one for its time in the engine, and one for each hop.

    POST /v1/chat/completions      continues the client's trace (W3C `traceparent`)
    └── chat MODEL                 the GenAI conventions' attributes; no prompt, no answer
        ├── queue                  per sequence: from its admission to its first step
        ├── prefill                from there to its first token
        └── decode                 from there to its last

The attributes are those of https://opentelemetry.io/docs/specs/semconv/gen-ai/. This module is imported only
when tracing is asked for; it needs opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import personae
from personae.api.telemetry.metrics import SequenceClock
from personae.api.telemetry.tracing import TracedJob, Tracing
from personae.errors import PersonaeError

_OPERATIONS = {"chatcmpl": "chat", "cmpl": "text_completion"}
_W3C = TraceContextTextMapPropagator()


class OpenTelemetry(Tracing):
    """Tracing to a provider of OpenTelemetry's SDK."""

    def __init__(self, provider: TracerProvider) -> None:
        self.tracer = provider.get_tracer("personae", personae.__version__)

    @contextmanager
    def generation(self, job: TracedJob, clocks: Mapping[str, SequenceClock]) -> Iterator[None]:
        """The span of a job, and when it has ended those of its sequences."""
        kind = _OPERATIONS.get(job.id.partition("-")[0], "chat")
        clocks = dict(clocks)
        params = job.logs[0].params
        span = self.tracer.start_span(
            f"{kind} {job.model.name}",
            attributes={
                "gen_ai.operation.name": kind,
                "gen_ai.provider.name": "personae",
                "gen_ai.request.model": job.model.name,
                "gen_ai.response.model": job.model.name,
                "gen_ai.response.id": job.id,
                "gen_ai.request.choice.count": len(job.logs),
                "gen_ai.request.max_tokens": params.max_tokens,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.frequency_penalty": params.frequency_penalty,
                "gen_ai.request.presence_penalty": params.presence_penalty,
                "gen_ai.request.seed": params.seed,
                **({"gen_ai.request.top_k": params.top_k} if params.top_k > 0 else {}),
            },
        )
        try:
            with trace.use_span(
                span, end_on_exit=False, record_exception=False, set_status_on_exception=False
            ):
                yield
        except BaseException as error:  # a cancellation is not an Exception
            code = getattr(error, "code", None) if isinstance(error, PersonaeError) else None
            span.set_attribute("error.type", code or type(error).__name__)
            span.set_status(Status(StatusCode.ERROR))
            raise
        finally:
            span.set_attribute("gen_ai.usage.input_tokens", job.prompt_tokens)
            span.set_attribute("gen_ai.usage.cache_read.input_tokens", job.cached_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", job.completion_tokens)
            span.set_attribute(
                "gen_ai.response.finish_reasons", [c.reason for c in clocks.values() if c.reason]
            )
            within = trace.set_span_in_context(span)
            for clock in clocks.values():
                self._hops(clock, within)
            span.end()

    def _hops(self, clock: SequenceClock, within: Context) -> None:
        """The spans of one sequence, as far as it got."""
        epoch = time.time_ns() - time.perf_counter_ns()
        ends = [
            ("queue", clock.arrived, clock.began),
            ("prefill", clock.began, clock.first if clock.tokens else None),
            ("decode", clock.first, clock.last if clock.tokens else None),
        ]
        for name, begun, ended in ends:
            if begun is not None and ended is not None:
                span = self.tracer.start_span(name, within, start_time=epoch + int(begun * 1e9))
                span.end(epoch + int(ended * 1e9))


class Traced:
    """Pure ASGI middleware around the whole app: the span of each request."""

    def __init__(self, app: ASGIApp, *, tracing: OpenTelemetry) -> None:
        self._app = app
        self._tracer = tracing.tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request within its span."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        method = scope["method"]
        status = 0

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with self._tracer.start_as_current_span(
            method,
            _W3C.extract(headers),
            SpanKind.SERVER,
            {"http.request.method": method, "url.path": scope["path"], "url.scheme": scope["scheme"]},
            record_exception=False,
        ) as span:
            try:
                await self._app(scope, receive, observed)
            finally:
                route = getattr(scope.get("route"), "path", None)
                if route is not None:
                    span.update_name(f"{method} {route}")
                    span.set_attribute("http.route", route)
                if "state" in scope:
                    span.set_attribute("personae.request_id", scope["state"].get("request_id", ""))
                if status:
                    span.set_attribute("http.response.status_code", status)
                if status >= 500 or not status:
                    span.set_attribute("error.type", str(status or 499))
                    span.set_status(Status(StatusCode.ERROR))


@contextmanager
def exporting(endpoint: str) -> Iterator[OpenTelemetry]:
    """Tracing to an OTLP collector over HTTP (`http://host:4318/v1/traces`), sent by a separate thread.

    The remaining spans are sent at the end.
    """
    provider = TracerProvider(resource=Resource.create({"service.name": "personae"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    try:
        yield OpenTelemetry(provider)
    finally:
        provider.shutdown()
