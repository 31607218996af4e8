"""Requests as Codex CLI and other agents send them, and what they send back."""

import json
from typing import Any

import pytest
from fake_engine import FakeEngine
from openai import OpenAI
from responses_asked import SHELL, THOUGHT, WEATHER, answer, ask, prompt_of
from starlette.applications import Starlette
from tool_chat import call

from personae.api.responses.sealed import sealed, unsealed

pytestmark = pytest.mark.anyio

SPAWN = {
    "type": "function",
    "name": "spawn_agent",
    "description": "Spawns an agent.",
    "parameters": {"type": "object", "properties": {"message": {"type": "string", "encrypted": True}}},
}
NAMESPACE: dict[str, Any] = {
    "type": "namespace",
    "name": "collaboration",
    "description": "Work with other agents.",
    "tools": [SPAWN, SHELL],
}
CODEX: dict[str, Any] = {
    "instructions": "You are Codex.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    ],
    "tools": [
        {**WEATHER, "strict": False},
        NAMESPACE,
        {"type": "web_search", "external_web_access": False, "search_content_types": ["text"]},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "c0de"},
}


async def test_the_request_of_codex_is_served_and_web_search_is_left_out(
    app: Starlette, engine: FakeEngine
) -> None:
    visit = await ask(app, **CODEX)
    assert visit.status == 200, visit.chunks
    own = "tools[1].tools[0].parameters#/properties/message/encrypted"  # a keyword of Codex's
    assert visit.headers["x-personae-ignored"] == f"tools[].web_search, {own}"
    prompt = prompt_of(engine)
    for name in ("get_weather", "collaboration__spawn_agent", "collaboration__shell"):
        assert f'"name": "{name}"' in prompt
    assert "web_search" not in prompt
    assert [each["type"] for each in json.loads(b"".join(visit.chunks))["tools"]] == ["function", "namespace"]


async def test_a_call_in_a_namespace_names_both_and_is_taken_back(app: Starlette, engine: FakeEngine) -> None:
    engine.answer = call("collaboration__spawn_agent", message="go") + call("get_weather", city="Cologne")
    [spawn, weather] = (await answer(app, **CODEX))["output"]
    assert (spawn["namespace"], spawn["name"]) == ("collaboration", "spawn_agent")
    assert json.loads(spawn["arguments"]) == {"message": "go"}
    assert weather["name"] == "get_weather"
    assert "namespace" not in weather
    engine.answer = "Done."
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "name": item["name"], "output": "ok"}
        for item in (spawn, weather)
    ]
    fields = CODEX | {"input": [*CODEX["input"], spawn, weather, *results]}
    assert (await answer(app, **fields))["output"][0]["content"][0]["text"] == "Done."
    assert call("collaboration__spawn_agent", message="go") in prompt_of(engine)


async def test_a_streamed_call_in_a_namespace_names_both(client: OpenAI, engine: FakeEngine) -> None:
    engine.answer = call("collaboration__spawn_agent", message="go")
    fields = {name: value for name, value in CODEX.items() if name != "client_metadata"}
    events = list(client.responses.create(model="base", stream=True, **fields))
    [done] = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert done.name == "spawn_agent"
    assert events[-1].type == "response.completed"
    item = events[-1].response.output[0]
    assert item.type == "function_call"
    assert (item.name, item.namespace) == ("spawn_agent", "collaboration")


@pytest.mark.parametrize("kind", ["web_search", "web_search_preview_2025_03_11", "image_generation"])
async def test_hosted_tools_that_clients_offer_by_themselves_are_left_out(kind: str, app: Starlette) -> None:
    visit = await ask(app, tools=[{"type": kind}, WEATHER])
    assert (visit.status, visit.headers["x-personae-ignored"]) == (200, f"tools[].{kind}")


@pytest.mark.parametrize("kind", ["file_search", "code_interpreter", "computer_use_preview"])
async def test_hosted_tools_that_the_answer_depends_on_are_refused(kind: str, app: Starlette) -> None:
    visit = await ask(app, tools=[{"type": kind}])
    assert (visit.status, visit.error["param"]) == (400, "tools[0].type")


async def test_choosing_a_tool_that_was_left_out_is_refused(app: Starlette) -> None:
    visit = await ask(app, tools=[{"type": "web_search"}], tool_choice="required")
    assert (visit.status, visit.error["param"]) == (400, "tool_choice")
    visit = await ask(app, tools=[{"type": "web_search"}], tool_choice={"type": "web_search"})
    assert (visit.status, visit.error["param"]) == (400, "tool_choice.type")


async def test_encrypted_reasoning_comes_when_asked_for_and_is_taken_back(
    app: Starlette, engine: FakeEngine
) -> None:
    engine.answer = f"{THOUGHT}Cologne."
    plain = (await answer(app))["output"][0]
    assert (plain["type"], plain["encrypted_content"]) == ("reasoning", None)
    thought, said = (await answer(app, include=["reasoning.encrypted_content"]))["output"]
    assert unsealed(thought["encrypted_content"]) == "Where?"
    bare = {name: thought[name] for name in ("type", "id", "summary", "encrypted_content")}
    talk = [{"role": "user", "content": "hi"}, bare, said, {"role": "user", "content": "Why?"}]
    await answer(app, input=talk)
    assert f"{THOUGHT}Cologne." in prompt_of(engine)


async def test_the_last_event_of_reasoning_has_it_encrypted(client: OpenAI, engine: FakeEngine) -> None:
    engine.answer = f"{THOUGHT}Cologne."
    include: Any = ["reasoning.encrypted_content"]
    events = client.responses.create(model="base", input="hi", stream=True, include=include)
    items = [event.item for event in events if event.type == "response.output_item.done"]
    assert items[0].type == "reasoning"
    assert items[0].encrypted_content == sealed("Where?")


async def test_reasoning_that_another_server_encrypted_is_ignored_and_named(
    app: Starlette, engine: FakeEngine
) -> None:
    for content in ("gAAAAABo", "personae-1.\u00e9", "personae-1.a"):
        theirs = {"type": "reasoning", "summary": [], "encrypted_content": content}
        visit = await ask(app, input=[{"role": "user", "content": "hi"}, theirs])
        assert visit.status == 200, visit.chunks
        assert visit.headers["x-personae-ignored"] == "input[].encrypted_content"
        assert prompt_of(engine).endswith("hi<|im_end|>\n<|im_start|>assistant\n")
    summary = [{"type": "summary_text", "text": "Short."}]
    await answer(app, input=[{"role": "user", "content": "hi"}, theirs | {"summary": summary}])
    assert "<think>Short.</think>" in prompt_of(engine)


@pytest.mark.parametrize("content", [None, [], [{"type": "reasoning_text", "text": "Hm."}]])
async def test_reasoning_may_be_the_last_item(content: Any, app: Starlette, engine: FakeEngine) -> None:
    item = {"type": "reasoning", "summary": [], "content": content}
    visit = await ask(app, input=[{"role": "user", "content": "hi"}, item])
    assert visit.status == 200, visit.chunks
    assert ("<think>Hm.</think>" in prompt_of(engine)) == bool(content)


async def test_reasoning_in_two_items_is_one_thought(app: Starlette, engine: FakeEngine) -> None:
    thoughts = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}
        for text in ("One. ", "Two.")
    ]
    said = {"role": "assistant", "content": "Three."}
    await answer(app, input=[{"role": "user", "content": "hi"}, *thoughts, said])
    assert "<think>One. Two.</think>Three." in prompt_of(engine)


async def test_unknown_keys_of_items_are_ignored_and_named(app: Starlette) -> None:
    visit = await ask(
        app,
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "hi", "cache_control": {}}]},
            {"type": "message", "role": "assistant", "content": "Hm.", "provider_specific_fields": {}},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{", "extra": 1},
            {"type": "function_call_output", "call_id": "a", "output": "No JSON.", "success": False},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        ],
    )
    assert visit.status == 200, visit.chunks
    assert visit.headers["x-personae-ignored"].split(", ") == [
        "input[].web_search_call",
        "input[].content[].cache_control",
        "input[].provider_specific_fields",
        "input[].extra",
        "input[].success",
    ]


async def test_a_schema_needs_no_name(app: Starlette, engine: FakeEngine) -> None:
    engine.answer = "1"
    format = {"type": "json_schema", "schema": {"type": "integer"}}
    assert (await ask(app, text={"format": format})).status == 200
    assert engine.submitted[-1].grammar is not None


async def test_a_request_whose_template_takes_long_is_prepared_in_a_thread_and_answered(
    app: Starlette, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("personae.api.prompt._BRIEF_SECONDS", -1.0)  # as on a machine that is very busy
    assert (await answer(app))["status"] == "completed"


LONG_SERVER, LONG_TOOL = "mcp__enterprise-database-management", "synchronize_customer_records_for_all_regions"


def tools_of(names: list[str]) -> list[dict[str, Any]]:
    return [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in names]


async def test_a_joined_name_of_a_tool_in_a_namespace_has_no_limit_of_its_own(
    app: Starlette, engine: FakeEngine
) -> None:
    assert len(f"{LONG_SERVER}__{LONG_TOOL}") > 64
    longest = "n" * 128
    for server, tool in ((LONG_SERVER, LONG_TOOL), (longest, longest)):
        engine.answer = call(f"{server}__{tool}")
        offered = {"type": "namespace", "name": server, "description": "x", "tools": tools_of([tool])}
        [item] = (await answer(app, input="hi", store=False, tools=[offered]))["output"]
        assert (item["namespace"], item["name"]) == (server, tool)


async def test_a_functions_name_has_at_most_128_characters(app: Starlette, engine: FakeEngine) -> None:
    engine.answer = call("n" * 128)
    [item] = (await answer(app, input="hi", tools=tools_of(["n" * 128])))["output"]
    assert item["name"] == "n" * 128
    refused = await ask(app, input="hi", tools=tools_of(["n" * 129]))
    assert (refused.status, refused.error["param"]) == (400, "tools[0].name")


async def test_more_than_128_tools_are_served_and_more_than_1024_refused_by_number(app: Starlette) -> None:
    names = [f"f{number}" for number in range(1025)]
    spread = [
        {"type": "namespace", "name": f"s{at}", "description": "x", "tools": tools_of(names[at : at + 65])}
        for at in (0, 65)
    ]
    for tools in (tools_of(names[:130]), spread):
        visit = await ask(app, input="hi", tools=tools)
        assert visit.status == 200 or visit.error["code"] == "context_length_exceeded", visit.chunks
    refused = await ask(app, input="hi", tools=tools_of(names))
    assert refused.status == 400
    assert "1024" in refused.error["message"].replace(",", "")
