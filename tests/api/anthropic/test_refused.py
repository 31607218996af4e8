"""What `POST /v1/messages` refuses, by the client's names, and what it ignores and says so."""

import json
from typing import Any

import asgi
import pytest
from fake_engine import FakeEngine
from starlette.applications import Starlette

from personae.api.app import create_app

pytestmark = pytest.mark.anyio
TOOL = {"name": "f", "input_schema": {"type": "object"}}
TALK = [{"role": "user", "content": "hi"}]


async def ask(app: Starlette, path: str = "/v1/messages", **fields: Any) -> asgi.Visit:
    body = {"model": "base", "max_tokens": 10, "messages": TALK, **fields}
    return await asgi.Visit(path, {k: v for k, v in body.items() if v != "left out"}).run(app)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "left out"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "pope", "content": "hi"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [*TALK, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "messages[1].content[0].tool_use_id",
        ),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop": "x"}, "stop"),
        ({"tools": [TOOL | {"name": "no good"}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]}, "tools[0].type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens"),
        ({"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]}, "mcp_servers"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"temprature": 1}, "temprature"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_errors_name_the_clients_field(fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    visit = await ask(create_app(engine), **fields)
    assert visit.status == 400, visit.chunks
    assert visit.error["param"] == param, visit.error
    assert json.loads(b"".join(visit.chunks))["type"] == "error"
    assert engine.submitted == []


async def test_what_comes_before_the_route_has_anthropics_shape_too() -> None:
    app = create_app(FakeEngine())
    async with asgi.client(app) as client:
        answers = [
            await client.get("/v1/messages"),
            await client.post("/v1/messages", content=b"{"),
            await client.post("/v1/messages/nowhere", json={}),
            await client.post("/v1/messages", json={}, headers={f"x-{i}": "" for i in range(300)}),
        ]
    assert [answer.status_code for answer in answers] == [405, 400, 404, 431]
    for answer in answers:
        assert answer.json()["type"] == "error"
        assert answer.json()["error"].keys() >= {"type", "message"}
        assert answer.json()["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_what_this_model_has_no_way_to_do_is_ignored_and_named() -> None:
    visit = await ask(
        create_app(FakeEngine()),
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        messages=[{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, *TALK],
    )
    assert visit.status == 200, visit.chunks
    assert sorted(visit.headers["x-personae-ignored"].split(", ")) == [
        "messages[].content[].redacted_thinking",
        "output_config.effort",
        "thinking",
    ]


async def test_cache_control_and_metadata_are_taken_without_a_word() -> None:
    mark = {"type": "ephemeral"}
    visit = await ask(
        create_app(FakeEngine()),
        metadata={"user_id": "ann"},
        system=[{"type": "text", "text": "Be brief.", "cache_control": mark}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": mark}]}],
    )
    assert visit.status == 200, visit.chunks
    assert "x-personae-ignored" not in visit.headers


async def test_counting_refuses_what_it_does_not_know() -> None:
    app = create_app(FakeEngine())
    path = "/v1/messages/count_tokens"
    assert (await ask(app, path)).error["param"] == "max_tokens"
    assert (await ask(app, path, max_tokens="left out", model="nobody")).status == 404
    long = [{"role": "user", "content": "x" * 600}]
    visit = await ask(app, path, max_tokens="left out", messages=long)
    assert visit.status == 200  # longer than the context, which is what one wants to know
    assert json.loads(b"".join(visit.chunks))["input_tokens"] > 600


async def test_a_result_that_is_an_error_says_so_to_the_model() -> None:
    engine = FakeEngine()
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "no network", "is_error": True}
    talk = [*TALK, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    visit = await ask(create_app(engine), messages=talk)
    assert visit.status == 200, visit.chunks
    prompt = engine.tokenizer.decode(engine.submitted[-1].tokens, skip_special_tokens=False)
    assert "Error: no network" in prompt
