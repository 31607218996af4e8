"""Fields and routes that vLLM adds to OpenAI's, as its clients use them."""

from typing import Any

import anyio
import asgi
import pytest
from fake_engine import FakeEngine, byte_tokenizer
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

from personae.actors.client import EngineStats
from personae.api.app import create_app
from personae.api.http.drain import DrainMiddleware
from personae.api.settings import ApiSettings
from personae.engine.stats import STEP_TOKENS, EngineCounters

pytestmark = pytest.mark.anyio
IDS = byte_tokenizer()
USER = {"role": "user", "content": "hi"}


async def post(app: Starlette, path: str, **fields: Any) -> Any:
    needed: dict[str, Any] = {"messages": [USER]} if path.startswith("chat") else {"prompt": "hi"}
    async with asgi.client(app) as client:
        return await client.post(f"/v1/{path}", json={**needed, **fields})


async def chat(app: Starlette, **fields: Any) -> Any:
    response = await post(app, "chat/completions", **fields)
    assert response.status_code == 200, response.text
    return response.json()


async def complete(app: Starlette, **fields: Any) -> Any:
    response = await post(app, "completions", **fields)
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(app: Starlette, path: str, **fields: Any) -> list[Any]:
    needed: dict[str, Any] = {"messages": [USER]} if path.startswith("chat") else {"prompt": "hi"}
    visit = await asgi.Visit(f"/v1/{path}", {**needed, "stream": True, **fields}).run(app)
    assert visit.status == 200, visit.chunks
    return visit.events()


async def test_tokens_may_be_written_as_their_ids(app: Starlette) -> None:
    asked: dict[str, Any] = {"return_tokens_as_token_ids": True, "max_tokens": 2, "seed": 1}
    content = (await chat(app, logprobs=True, top_logprobs=2, **asked))["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{id}" for id in IDS.encode("He", False)]
    assert content[0]["bytes"] == [ord("H")]
    assert content[0]["top_logprobs"][0]["token"] == content[0]["token"]
    chunks = await streamed(app, "chat/completions", logprobs=True, **asked)
    entries = [c["logprobs"] for chunk in chunks[:-1] for c in chunk["choices"] if c["logprobs"]]
    assert [e["token"] for each in entries for e in each["content"]] == [e["token"] for e in content]
    text = (await complete(app, logprobs=2, echo=True, **asked))["choices"][0]["logprobs"]
    assert text["tokens"] == [f"token_id:{id}" for id in IDS.encode("hiHe", False)]
    assert text["top_logprobs"][1].keys() >= {text["tokens"][1]}
    assert (await chat(app, logprobs=True, **asked | {"return_tokens_as_token_ids": False}))["choices"][0][
        "logprobs"
    ]["content"][0]["token"] == "H"


async def test_logprobs_of_named_tokens_are_told(app: Starlette, engine: FakeEngine) -> None:
    a, b = IDS.encode("AB", False)
    asked: dict[str, Any] = {"logprob_token_ids": [a, b, a], "max_tokens": 1}
    [entry] = (await chat(app, logprobs=True, **asked))["choices"][0]["logprobs"]["content"]
    assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [
        ("A", -1.0 - a),
        ("B", -1.0 - b),
    ]
    assert engine.submitted[0].params.logprob_tokens == (a, b)
    [top] = (await complete(app, logprobs=1, **asked))["choices"][0]["logprobs"]["top_logprobs"]
    assert top.keys() == {"A", "B", "H"}


@pytest.mark.parametrize("most", [20, 5])
async def test_minus_one_asks_for_as_many_logprobs_as_the_server_gives(most: int, engine: FakeEngine) -> None:
    app = create_app(engine, ApiSettings(max_logprobs=most))
    await chat(app, logprobs=True, top_logprobs=-1)
    await complete(app, logprobs=-1, prompt_logprobs=-1)
    assert [log.params.logprobs for log in engine.submitted] == [most, most]
    assert engine.submitted[1].params.prompt_logprobs == most


async def test_max_tokens_minus_one_fills_the_context(app: Starlette, engine: FakeEngine) -> None:
    await chat(app, max_tokens=-1)
    await complete(app, max_tokens=-1)
    await complete(app, max_tokens=-1, truncate_prompt_tokens=-1)
    assert [log.params.max_tokens + len(log.tokens) for log in engine.submitted] == [512, 512, 512]


async def test_a_prompt_is_cut_on_the_side_that_is_asked_for(app: Starlette, engine: FakeEngine) -> None:
    ids = IDS.encode("abcdef", False)
    for prompt in ("abcdef", ids):
        for side, kept in (("right", "abc"), ("left", "def"), (None, "def")):
            await complete(app, prompt=prompt, truncate_prompt_tokens=3, truncation_side=side)
            assert IDS.decode(engine.submitted[-1].tokens) == kept
    await chat(app, truncate_prompt_tokens=4, truncation_side="right")
    assert engine.tokenizer.decode(engine.submitted[-1].tokens, False) == "<|im_start|>use"


async def test_a_request_may_bring_its_chat_template_where_the_server_allows_it(engine: FakeEngine) -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    refused = await post(create_app(engine), "chat/completions", chat_template=template)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "chat_template")
    assert (error["code"], "--trust-request-chat-template" in error["message"]) == (
        "unsupported_parameter",
        True,
    )
    assert engine.submitted == []
    app = create_app(engine, ApiSettings(trust_request_chat_template=True))
    await chat(app, chat_template=template)
    assert engine.tokenizer.decode(engine.submitted[0].tokens) == "[user] hi"
    async with asgi.client(app) as client:
        asked = {"messages": [USER], "chat_template": template}
        tokens = (await client.post("/tokenize", json=asked)).json()["tokens"]
    assert tuple(tokens) == engine.submitted[0].tokens


async def test_a_model_without_a_template_takes_one_from_the_request() -> None:
    engine = FakeEngine(tokenizer=byte_tokenizer(None))
    app = create_app(engine, ApiSettings(trust_request_chat_template=True))
    await chat(app, chat_template="{{ messages[0].content }}")
    assert engine.tokenizer.decode(engine.submitted[0].tokens) == "hi"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% if %}", "`chat_template` is not valid Jinja"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
        ("{{ 'x' * 10 ** 9 }}", "a product is too large"),
        ("{{ 9 ** 9 ** 9 ** 9 }}", "a power is too large"),
        ("{{ range(10 ** 9) }}", "refuses these messages"),
        ("x" * 100_000, "at most 65536 characters"),
        ("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", "nested too deeply"),
        ("{{ " + "-" * 60_000 + "1 }}", "nested too deeply"),
        ("{% if 1 %}" * 3_000 + "{% endif %}" * 3_000, "nested too deeply"),
    ],
    ids=range(9),
)
async def test_a_template_that_cannot_be_run_is_refused(template: str, said: str, engine: FakeEngine) -> None:
    app = create_app(engine, ApiSettings(trust_request_chat_template=True))
    response = await post(app, "chat/completions", chat_template=template)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


async def test_the_role_chunk_of_a_stream_counts_no_tokens(app: Starlette) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    engine = FakeEngine(burst=4)
    *chunks, last, done = await streamed(create_app(engine), "chat/completions", stream_options=options)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    usage = chunks[0]["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (0, usage["prompt_tokens"])
    counts = [chunk["usage"]["completion_tokens"] for chunk in [*chunks, last]]
    assert counts == sorted(counts)
    assert counts[-1] == 14


async def test_a_whole_answer_has_null_for_what_was_not_asked_for(app: Starlette) -> None:
    answer = await chat(app)
    assert (answer["prompt_logprobs"], answer["prompt_token_ids"]) == (None, None)
    [choice] = (await complete(app))["choices"]
    assert (choice["prompt_logprobs"], choice["prompt_token_ids"]) == (None, None)
    [choice] = (await complete(app, prompt_logprobs=0, return_token_ids=True))["choices"]
    assert len(choice["prompt_logprobs"]) == 2
    assert choice["prompt_token_ids"] == IDS.encode("hi", False)


async def test_answers_have_a_fingerprint_that_changes_with_what_runs(app: Starlette) -> None:
    print_ = (await chat(app))["system_fingerprint"]
    assert print_.startswith("fp_")
    assert (await complete(app))["system_fingerprint"] == print_
    for path in ("chat/completions", "completions"):
        chunks = await streamed(app, path)
        assert {chunk["system_fingerprint"] for chunk in chunks[:-1]} == {print_}
    others = [
        create_app(FakeEngine(), ApiSettings(about="bfloat16 on a GPU")),
        create_app(FakeEngine(base_names=("other",))),
    ]
    assert len({print_, *[(await chat(other))["system_fingerprint"] for other in others]}) == 3


async def test_load_counts_the_requests_that_are_being_answered(engine: FakeEngine) -> None:
    app = create_app(engine)

    async def load() -> Any:
        async with asgi.client(app) as client:
            return (await client.get("/load")).json()

    assert await load() == {"server_load": 0}
    engine.hold_after = 3
    visit = asgi.Visit("/v1/completions", {"prompt": "hi"})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(visit.run, app)
        await anyio.wait_all_tasks_blocked()
        assert await load() == {"server_load": 1}
        visit.leave()
    assert await load() == {"server_load": 0}


async def test_ping_is_ready_for_whoever_asks(engine: FakeEngine) -> None:
    app = create_app(engine)
    async with asgi.client(app) as client:
        assert (await client.get("/ping")).status_code == 200
        assert (await client.post("/ping")).status_code == 200
        engine.figures = EngineStats(ready=False)
        assert (await client.get("/ping")).status_code == 503


@pytest.mark.parametrize("prefix", ["", "/llm", "/team/llm"])
async def test_a_prefix_may_be_stripped_by_the_proxy_or_left(prefix: str, engine: FakeEngine) -> None:
    app = create_app(engine, ApiSettings(root_path="/llm" if prefix == "/team/llm" else prefix))
    async with asgi.client(app) as client:
        for before in {"", prefix}:
            status = 404 if before == "/team/llm" else 200
            assert (await client.get(f"{before}/v1/models")).status_code == status
            asked = await client.post(f"{before}/v1/completions", json={"prompt": "hi"})
            assert asked.status_code == status
        described = (await client.get("/openapi.json")).json()
    assert ("servers" in described) == bool(prefix)
    if prefix:
        assert described["servers"] == [{"url": "/llm"}]


async def test_health_is_served_below_a_prefix_while_the_server_drains(engine: FakeEngine) -> None:
    drain = DrainMiddleware(create_app(engine, ApiSettings(root_path="/llm")), "/llm")
    drain.draining = True
    async with asgi.client(drain) as client:
        for path in ("/health", "/llm/health"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/llm/ready")).status_code == 503


async def test_metrics_show_what_requests_asked_for_and_how_large_steps_are(engine: FakeEngine) -> None:
    counts = [0] * (len(STEP_TOKENS) + 1)
    counts[0], counts[2], counts[-1] = 3, 2, 1
    engine.figures = EngineStats(counters=EngineCounters(tokens=20_030, step_tokens=tuple(counts)))
    app = create_app(engine)
    await complete(app, n=2, max_tokens=7, prompt=["a", "b"])
    async with asgi.client(app) as client:
        text = (await client.get("/metrics")).text
    samples = {
        (sample.name, sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    steps = "vllm:iteration_tokens_total"
    assert samples[f"{steps}_bucket", "1.0"] == 3
    assert samples[f"{steps}_bucket", "8.0"] == 3
    assert samples[f"{steps}_bucket", "16.0"] == 5
    assert samples[f"{steps}_bucket", "16384.0"] == 5
    assert samples[f"{steps}_bucket", "+Inf"] == samples[f"{steps}_count", None] == 6
    assert samples[f"{steps}_sum", None] == 20_030
    assert samples["vllm:request_params_n_count", None] == 2
    assert samples["vllm:request_params_n_sum", None] == 4
    assert samples["vllm:request_params_max_tokens_sum", None] == 14
