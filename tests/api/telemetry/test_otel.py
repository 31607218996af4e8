"""Spans, as the OpenTelemetry SDK and a collector see them."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import asgi
import pytest
from fake_engine import FakeEngine
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from patience import PATIENCE
from starlette.types import ASGIApp

from personae.api.app import create_app
from personae.api.telemetry.otel import OpenTelemetry, Traced, exporting

pytestmark = pytest.mark.anyio
SECRET = "the crown jewels"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHAT = {"model": "base", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 40}
SAMPLED = {"top_k": 5, "seed": 7, "frequency_penalty": 0.5, "presence_penalty": 0.25}


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> OpenTelemetry:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return OpenTelemetry(provider)


def traced(engine: FakeEngine, tracing: OpenTelemetry) -> ASGIApp:
    return Traced(create_app(engine, tracing=tracing), tracing=tracing)


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    spans = exporter.get_finished_spans()
    return {span.name: span for span in spans}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_a_span_with_one_for_the_engine_and_one_for_each_hop(
    exporter: InMemorySpanExporter, tracing: OpenTelemetry, stream: bool
) -> None:
    engine = FakeEngine(answer=SECRET)
    async with asgi.client(traced(engine, tracing)) as client:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
        await client.post("/v1/chat/completions", json=CHAT | SAMPLED | {"stream": stream}, headers=headers)
    spans = by_name(exporter)
    assert set(spans) == {"POST /v1/chat/completions", "chat base", "decode"}
    top, engine_span, decode = spans["POST /v1/chat/completions"], spans["chat base"], spans["decode"]
    assert f"{top.context.trace_id:032x}" == TRACE
    assert f"{top.parent.span_id:016x}" == PARENT
    assert engine_span.parent.span_id == top.context.span_id
    assert decode.parent.span_id == engine_span.context.span_id
    assert top.attributes["http.response.status_code"] == 200
    assert top.attributes["personae.request_id"] == "mine"
    said = engine_span.attributes
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.request.model"] == "base"
    assert said["gen_ai.request.max_tokens"] == 40
    assert {name: said[f"gen_ai.request.{name}"] for name in SAMPLED} == SAMPLED
    assert said["gen_ai.usage.cache_read.input_tokens"] == said["gen_ai.usage.input_tokens"] // 2
    assert said["gen_ai.usage.output_tokens"] == len(SECRET) + 1
    assert said["gen_ai.usage.input_tokens"] > len(SECRET)
    assert said["gen_ai.response.finish_reasons"] == ("stop",)
    assert top.start_time <= decode.start_time <= decode.end_time <= top.end_time
    assert not any("crown" in str(span.to_json()) for span in exporter.get_finished_spans())


async def test_an_error_is_the_spans_status_without_its_words(
    exporter: InMemorySpanExporter, tracing: OpenTelemetry
) -> None:
    engine = FakeEngine(refuse=ValueError(SECRET))
    async with asgi.client(traced(engine, tracing)) as client:
        await client.post("/v1/chat/completions", json=CHAT)
        engine.refuse = None
        engine.fail_after = 3
        await client.post("/v1/completions", json={"model": "base", "prompt": "a"})
        await client.get("/v1/models/none")
    spans = by_name(exporter)
    assert spans["chat base"].attributes["error.type"] == "ValueError"
    assert spans["text_completion base"].attributes["error.type"] == "request_failed"
    assert spans["POST /v1/completions"].status.status_code.name == "ERROR"
    assert spans["GET /v1/models/{id:path}"].status.status_code.name == "UNSET"
    assert not any("crown" in str(span.to_json()) for span in exporter.get_finished_spans())


class Collector(BaseHTTPRequestHandler):
    """An OTLP collector that keeps what it gets."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.got.append((self.path, body, self.headers.get("content-encoding")))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), Collector)
    server.got = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join(PATIENCE)
    server.server_close()


async def test_spans_reach_a_collector(collector: HTTPServer) -> None:
    with exporting(f"http://127.0.0.1:{collector.server_port}/v1/traces") as tracing:
        async with asgi.client(traced(FakeEngine(), tracing)) as client:
            await client.post("/v1/completions", json={"model": "base", "prompt": "a"})
    names = set()
    for path, body, _ in collector.got:
        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names |= {span.name for scope in resource.scope_spans for span in scope.spans}
    assert names == {"POST /v1/completions", "text_completion base", "decode"}
