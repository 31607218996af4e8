"""The small routes."""

import asgi
import pytest
from fake_engine import FakeEngine
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

import personae
from personae.actors.client import AdapterStats, EngineStats, ModelCard
from personae.api.app import create_app
from personae.api.settings import ApiSettings
from personae.errors import Overloaded

pytestmark = pytest.mark.anyio


async def test_models_are_listed_base_first(app: Starlette) -> None:
    async with asgi.client(app) as client:
        models = (await client.get("/v1/models")).json()["data"]
        one = (await client.get("/v1/models/team/pirate")).json()
    assert [model["id"] for model in models] == ["base", "team/pirate"]
    assert one == models[1]
    assert (one["parent"], one["max_model_len"], models[0]["parent"]) == ("base", 512, None)


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


async def test_metrics_show_the_engine_at_the_moment_of_the_scrape(engine: FakeEngine) -> None:
    app = create_app(engine, ApiSettings(max_adapters=8))
    engine.figures = EngineStats(
        running=3,
        waiting=2,
        pages_total=10,
        pages_used=4,
        prefix_queries=100,
        prefix_hits=60,
        preemptions=1,
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
            running={"b" * 64: 1, "d" * 64: 2},
            waiting={"c" * 64: 1, "mix:" + "d" * 64 + "*0.5": 1},
        ),
        mailboxes={"executor": 2},
    )
    for name in "bcd":
        app.state.door.metrics.adapter_names.learn(ModelCard(name, name * 64, 0))
    seen = await scrape(app)
    base = labels(model_name="base")
    assert seen["vllm:num_requests_running", base] == 3
    assert seen["vllm:num_requests_waiting", base] == 2
    assert seen["vllm:kv_cache_usage_perc", base] == pytest.approx(0.4)
    assert seen["vllm:prefix_cache_queries_total", base] == 100
    assert seen["vllm:prefix_cache_hits_total", base] == 60
    assert seen["vllm:num_preemptions_total", base] == 1
    assert seen["personae:mailbox_depth", labels(actor="executor")] == 2
    info = labels(max_lora="8", running_lora_adapters="b,d", waiting_lora_adapters="c,mix")
    assert seen["vllm:lora_requests_info", info] > 1_700_000_000
    assert seen["personae:adapter_sequences", labels(adapter="d", state="running")] == 2
    assert seen["personae:adapter_sequences", labels(adapter="c", state="waiting")] == 1
    assert seen["personae:adapters_held", labels(place="device")] == 2
    assert seen["personae:adapters_held", labels(place="host")] == 3
    assert seen["personae:adapter_host_bytes", labels()] == 1000
    assert seen["personae:adapters_in_line", labels()] == 1
    assert seen["personae:adapter_loads_total", labels(source="disk")] == 3
    assert seen["personae:adapter_load_seconds_total", labels(source="host")] == 0.25
    assert seen["personae:adapter_evictions_total", labels()] == 4
    assert seen["personae:adapter_yields_total", labels()] == 5
    assert seen["personae:fairness_gap", base] == 120
    engine.figures = EngineStats(adapters=AdapterStats(running={"b" * 64: 1}))
    seen = await scrape(app)
    infos = [labels for name, labels in seen if name == "vllm:lora_requests_info"]
    assert infos == [labels(max_lora="8", running_lora_adapters="b", waiting_lora_adapters="")]
    assert ("personae:adapter_sequences", labels(adapter="d", state="running")) not in seen


async def test_two_apps_count_apart(app: Starlette) -> None:
    async with asgi.client(app) as client:
        await client.post("/v1/completions", json={"model": "base", "prompt": "hi"})
    other = await scrape(create_app(FakeEngine()))
    assert ("vllm:prompt_tokens_total", labels(model_name="base")) not in other


async def test_names_that_tenants_make_up_do_not_grow_the_metrics_without_bound(app: Starlette) -> None:
    metrics = app.state.door.metrics
    labels = {metrics.label(f"adapter-{number}") for number in range(1000)}
    assert len(labels) == 256, "the base is one of them"
    assert "other" in labels
    assert metrics.label("base") == "base"
    assert metrics.label("adapter-0") == "adapter-0"
