"""The small routes."""

import asgi
import pytest
from fake_engine import FakeEngine
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

import personae
from personae.actors.client import EngineStats
from personae.actors.kit.gauges import Gauge
from personae.actors.messages import AdapterStats
from personae.api.app import create_app
from personae.api.settings import ApiSettings
from personae.engine.stats import EngineCounters, StepTimings
from personae.errors import Overloaded

pytestmark = pytest.mark.anyio


async def test_models_are_listed_base_first(app: Starlette) -> None:
    async with asgi.client(app) as client:
        models = (await client.get("/v1/models")).json()["data"]
        one = (await client.get("/v1/models/team/pirate")).json()
    assert [model["id"] for model in models] == ["base", "team/pirate"]
    assert one == models[1]
    assert (one["parent"], one["max_model_len"], models[0]["parent"]) == ("base", 512, None)
    assert [model["quantization"] for model in models] == ["int8", None]
    assert [model["rank"] for model in models] == [None, 8]


async def test_ready_waits_for_the_engine_and_health_does_not(app: Starlette, engine: FakeEngine) -> None:
    engine.figures = EngineStats(ready=False)
    async with asgi.client(app) as client:
        assert (await client.get("/health")).status_code == 200
        refused = await client.get("/ready")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        engine.figures = EngineStats()
        assert (await client.get("/ready")).status_code == 200


async def test_the_version_is_the_packages(app: Starlette) -> None:
    async with asgi.client(app) as client:
        assert (await client.get("/version")).json() == {"version": personae.__version__}


async def test_tokenize_and_detokenize_are_inverse(app: Starlette) -> None:
    async with asgi.client(app) as client:
        asked = {"prompt": "né", "return_token_strs": True}
        tokens = (await client.post("/tokenize", json=asked)).json()
        text = (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"]) == 3
    assert tokens["max_model_len"] == 512
    assert text == {"prompt": "né"}


async def test_tokenize_renders_a_conversation_as_chat_would(app: Starlette, engine: FakeEngine) -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with asgi.client(app) as client:
        tokens = (await client.post("/tokenize", json={"model": "base", "messages": messages})).json()
        await client.post("/v1/chat/completions", json={"model": "base", "messages": messages})
    assert tuple(tokens["tokens"]) == engine.submitted[0].tokens
    assert tokens["token_strs"] is None


async def test_a_long_text_is_tokenized_too(app: Starlette) -> None:
    async with asgi.client(app) as client:
        tokens = (await client.post("/tokenize", json={"prompt": "x" * 20_000})).json()
    assert tokens["count"] == 20_000


async def test_tokenize_and_detokenize_take_the_same_number_of_tokens(app: Starlette) -> None:
    most = 2**16
    async with asgi.client(app) as client:
        for count, status in ((most, 200), (most + 1, 400)):
            there = await client.post("/tokenize", json={"prompt": "x" * count})
            back = await client.post("/detokenize", json={"tokens": [3] * count})
            assert (there.status_code, back.status_code) == (status, status)
    assert there.json()["error"]["code"] == back.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "model": "nobody"}, "model"),
        ("/tokenize", {"prompt": "a", "foo": 1}, "foo"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, 300]}, "tokens[1]"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": "nobody"}, "model"),
    ],
    ids=str,
)
async def test_they_refuse(path: str, body: dict[str, object], param: str, app: Starlette) -> None:
    async with asgi.client(app) as client:
        response = await client.post(path, json=body)
    assert 400 <= response.status_code < 500
    assert response.json()["error"]["param"] == param


async def scrape(app: Starlette) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    async with asgi.client(app) as client:
        text = (await client.get("/metrics")).text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def labels(**pairs: str) -> frozenset[tuple[str, str]]:
    return frozenset(pairs.items())


async def test_metrics_count_what_was_served() -> None:
    engine = FakeEngine()
    app = create_app(engine)
    async with asgi.client(app) as client:
        ask = {"model": "base", "prompt": "hi", "n": 2}
        await client.post("/v1/completions", json=ask)
        await client.post("/v1/completions", json={**ask, "n": 1, "max_tokens": 1, "model": "team/pirate"})
        engine.fail_after = 3
        await client.post("/v1/completions", json=ask)
        engine.refuse = Overloaded("full")
        await client.post("/v1/completions", json=ask)
        await client.get("/nowhere/7")
    seen = await scrape(app)
    base = labels(model_name="base")
    assert seen["vllm:prompt_tokens_total", base] == 4
    assert seen["vllm:generation_tokens_total", base] == 28 + 6
    assert seen["vllm:request_success_total", labels(model_name="base", finished_reason="stop")] == 2
    assert seen["vllm:request_success_total", labels(model_name="base", finished_reason="error")] == 2
    pirate = labels(model_name="team/pirate")
    assert seen["vllm:request_success_total", labels(model_name="team/pirate", finished_reason="length")] == 1
    assert seen["vllm:time_to_first_token_seconds_count", pirate] == 1
    assert seen["vllm:e2e_request_latency_seconds_count", base] == 4
    assert seen["vllm:inter_token_latency_seconds_count", base] == 26 + 4
    assert seen["vllm:request_time_per_output_token_seconds_count", base] == 4
    http = "personae:http_requests_total"
    assert seen[http, labels(method="POST", route="/v1/completions", status="200")] == 2
    assert seen[http, labels(method="GET", route="unknown", status="404")] == 1


async def test_metrics_of_several_engines_say_which_of_them(engine: FakeEngine) -> None:
    app = create_app(engine, ApiSettings(max_adapters=8))
    each = {
        0: EngineStats(running=3, waiting=1, pages_total=10, pages_used=5, restarts=1),
        1: EngineStats(running=1, waiting=0, pages_total=10, ready=False, adapter_running={"d" * 64: 1}),
    }
    engine.figures = EngineStats(
        running=4, waiting=6, pages_total=20, moved=7, prefill_engines=1, replicas=each
    )
    seen = await scrape(app)
    base = {"model_name": "base"}
    assert seen["vllm:num_requests_running", labels(**base, engine="0")] == 3
    assert seen["vllm:num_requests_running", labels(**base, engine="1")] == 1
    assert seen["vllm:num_requests_waiting", labels(**base, engine="0")] == 1
    assert seen["vllm:num_requests_waiting", labels(**base, engine="")] == 5
    assert seen["vllm:kv_cache_usage_perc", labels(**base, engine="0")] == 0.5
    assert seen["personae:engine_restarts_total", labels(**base, engine="0")] == 1
    assert seen["personae:engine_ready", labels(**base, engine="1")] == 0
    assert seen["personae:streams_moved_total", labels(**base)] == 7
    assert seen["personae:prefill_engines", labels(**base)] == 1
    infos = [dict(label) for name, label in seen if name == "vllm:lora_requests_info"]
    assert {(info["engine"], info["running_lora_adapters"]) for info in infos} == {
        ("0", ""),
        ("1", "team/pirate"),
    }


async def test_metrics_show_the_engine_at_the_moment_of_the_scrape(engine: FakeEngine) -> None:
    app = create_app(engine, ApiSettings(max_adapters=8))
    engine.figures = EngineStats(
        running=3,
        waiting=2,
        pages_total=10,
        pages_used=4,
        counters=EngineCounters(
            prefix_queries=100, prefix_hits=60, preemptions=1, timings=StepTimings(forward=1.5, read=0.5)
        ),
        fairness_gap=120.0,
        adapters=AdapterStats(
            device=2,
            host=3,
            host_bytes=1000,
            line=1,
            evictions=4,
            yields=5,
            loads={"disk": 3, "host": 2},
            load_seconds={"disk": 1.5, "host": 0.25},
        ),
        adapter_running={"d" * 64: 2},
        adapter_waiting={"c" * 64: 1, "d" * 64: 1, "mix:" + "d" * 64 + "*0.5": 1},
        page_size=16,
        actors=(
            Gauge("core/executor", "busy", 2, 100, 0.25, 7, 1),
            Gauge("frontend/queue/0-poet", "idle", 3, 100, 0.5, 7, 0),
            Gauge("frontend/queue/1-clerk", "idle", 4, 100, 0.75, 7, 0),
        ),
    )
    seen = await scrape(app)
    base = labels(model_name="base")
    assert seen["vllm:num_requests_running", base] == 3
    assert seen["vllm:num_requests_waiting", base] == 2
    assert seen["vllm:kv_cache_usage_perc", base] == pytest.approx(0.4)
    assert seen["vllm:prefix_cache_queries_total", base] == 100
    assert seen["vllm:prefix_cache_hits_total", base] == 60
    assert seen["vllm:num_preemptions_total", base] == 1
    assert seen["personae:mailbox_depth", labels(actor="core/executor")] == 2
    assert seen["personae:mailbox_oldest_seconds", labels(actor="core/executor")] == 0.25
    assert seen["personae:actor_restarts_total", labels(actor="core/executor")] == 1
    assert seen["personae:mailbox_depth", labels(actor="frontend/queue")] == 7
    assert seen["personae:mailbox_oldest_seconds", labels(actor="frontend/queue")] == 0.75
    assert seen["personae:step_part_seconds_total", labels(part="forward")] == 1.5
    assert seen["vllm:cache_config_info", labels(block_size="16", num_gpu_blocks="10")] == 1
    waiting = "cccccccccccc,mix,team/pirate"
    info = labels(max_lora="8", running_lora_adapters="team/pirate", waiting_lora_adapters=waiting)
    assert seen["vllm:lora_requests_info", info] > 1_700_000_000
    assert seen["personae:adapter_sequences", labels(adapter="team/pirate", state="running")] == 2
    assert seen["personae:adapter_sequences", labels(adapter="mix", state="waiting")] == 1
    assert seen["personae:adapters_held", labels(place="device")] == 2
    assert seen["personae:adapters_held", labels(place="host")] == 3
    assert seen["personae:adapter_host_bytes", labels()] == 1000
    assert seen["personae:adapters_in_line", labels()] == 1
    assert seen["personae:adapter_loads_total", labels(source="disk")] == 3
    assert seen["personae:adapter_load_seconds_total", labels(source="host")] == 0.25
    assert seen["personae:adapter_evictions_total", labels()] == 4
    assert seen["personae:adapter_yields_total", labels()] == 5
    assert seen["personae:fairness_gap", base] == 120
    engine.figures = EngineStats(adapter_running={"d" * 64: 1})
    seen = await scrape(app)
    infos = [labels for name, labels in seen if name == "vllm:lora_requests_info"]
    assert infos == [labels(max_lora="8", running_lora_adapters="team/pirate", waiting_lora_adapters="")]
    assert ("personae:adapter_sequences", labels(adapter="mix", state="waiting")) not in seen


async def test_two_apps_count_apart(app: Starlette) -> None:
    async with asgi.client(app) as client:
        await client.post("/v1/completions", json={"model": "base", "prompt": "hi"})
    other = await scrape(create_app(FakeEngine()))
    assert ("vllm:prompt_tokens_total", labels(model_name="base")) not in other


async def test_names_that_tenants_make_up_do_not_grow_the_metrics_without_bound(app: Starlette) -> None:
    metrics = app.state.services.metrics
    labels = {metrics.label(f"adapter-{number}") for number in range(1000)}
    assert len(labels) == 256, "the base is one of them"
    assert "other" in labels
    assert metrics.label("base") == "base"
    assert metrics.label("adapter-0") == "adapter-0"
