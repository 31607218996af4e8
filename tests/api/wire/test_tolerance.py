"""What clients send that means nothing here: ignored by name in what comes back, refused where it steers."""

import json
from typing import Any

import asgi
import pytest
from fake_engine import FakeEngine, byte_tokenizer
from starlette.applications import Starlette
from tool_chat import TAGS, TEMPLATE, WEATHER

from personae.api.app import create_app
from personae.api.settings import ApiSettings
from personae.api.wire.foreign import ANY, FOREIGN
from personae.api.wire.schema import ChatRequest

pytestmark = pytest.mark.anyio
USER = {"role": "user", "content": "hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "rain"}
SPECIFIC = {"provider_specific_fields": {"refusal": None}}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(tokenizer=byte_tokenizer(TEMPLATE, TAGS), max_model_len=4096)


async def post(app: Starlette, path: str = "chat/completions", **fields: Any) -> Any:
    needed: dict[str, Any] = {"chat/completions": {"messages": [USER]}, "completions": {"prompt": "hi"}}
    body = {"model": "base", **needed.get(path, {"input": "hi"}), **fields}
    async with asgi.client(app) as client:
        return await client.post(f"/v1/{path}", json=body)


def ignored(response: Any) -> list[str]:
    names = response.headers.get("x-personae-ignored")
    return [] if names is None else names.split(", ")


IN_MESSAGES: list[tuple[dict[str, Any], list[str]]] = [
    (SPECIFIC, ["provider_specific_fields"]),
    ({"thinking_blocks": [], "reasoning_details": [{}]}, ["reasoning_details", "thinking_blocks"]),
    ({"images": [], "extra_content": {"a": 1}, "id": "x"}, ["extra_content", "id", "images"]),
    ({"token_ids": [1], "cache_control": {"type": "ephemeral"}}, ["cache_control", "token_ids"]),
    ({"annotations": [], "audio": None, "refusal": None, "function_call": None}, []),
]


@pytest.mark.parametrize(("extra", "names"), IN_MESSAGES, ids=str)
async def test_unknown_keys_of_past_messages_are_ignored_and_named(
    extra: dict[str, Any], names: list[str], app: Starlette, engine: FakeEngine
) -> None:
    plain = [USER, {"role": "assistant", "content": "Hello."}, USER]
    await post(app, messages=plain)
    response = await post(app, messages=[USER, {"role": "assistant", "content": "Hello.", **extra}, USER])
    assert response.status_code == 200, response.text
    assert ignored(response) == [f"messages[].{name}" for name in names]
    assert engine.submitted[0].tokens == engine.submitted[1].tokens


async def test_litellms_second_turn_with_a_call_is_answered(app: Starlette, engine: FakeEngine) -> None:
    said = {
        "role": "assistant",
        "content": None,
        "tool_calls": [CALL | {"function": CALL["function"] | SPECIFIC, "extra_content": {}} | SPECIFIC],
        "function_call": None,
        **SPECIFIC,
    }
    tools = [WEATHER | {"cache_control": {"type": "ephemeral"}}]
    response = await post(app, messages=[USER, said, RESULT | {"cache_control": {}}], tools=tools)
    assert response.status_code == 200, response.text
    assert ignored(response) == [
        "messages[].provider_specific_fields",
        "messages[].tool_calls[].extra_content",
        "messages[].tool_calls[].provider_specific_fields",
        "messages[].tool_calls[].function.provider_specific_fields",
        "messages[].cache_control",
        "tools[].cache_control",
    ]
    await post(app, messages=[USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT], tools=[WEATHER])
    assert engine.submitted[0].tokens == engine.submitted[1].tokens


async def test_parts_of_content_and_tools_may_have_keys_of_other_servers(app: Starlette) -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    function = WEATHER["function"] | {"input_examples": [], "cache_control": {}}
    response = await post(
        app,
        messages=[{"role": "user", "content": [part]}],
        tools=[{"type": "function", "function": function, "defer_loading": True}],
    )
    assert response.status_code == 200, response.text
    assert ignored(response) == [
        "messages[].content[].cache_control",
        "tools[].defer_loading",
        "tools[].function.cache_control",
        "tools[].function.input_examples",
    ]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [WEATHER | {"strict": True}]}, "tools[0].strict"),
        ({"tools": [WEATHER | {"parameters": {}}]}, "tools[0].parameters"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "stict": True}}]},
            "tools[0].function.stict",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "input_schema": {}}}]},
            "tools[0].function.input_schema",
        ),
        ({"response_format": {"type": "json_object", "schem": {}}}, "response_format.schem"),
        ({"structured_outputs": {"regex": "a", "x": 1}}, "structured_outputs.x"),
        ({"tool_choice": {"type": "function", "function": {"name": "f", "x": 1}}}, "tool_choice.function.x"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"temprature": 0.5}, "temprature"),
    ],
    ids=str,
)
async def test_what_steers_sampling_or_binds_the_answer_is_refused_by_name(
    change: dict[str, Any], param: str, app: Starlette
) -> None:
    response = await post(app, **change)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["code"] == "unknown_parameter"


async def test_metadata_may_hold_anything(app: Starlette) -> None:
    for metadata in ({"a": "b"}, {"a": 1, "b": {"c": [None]}}):
        assert (await post(app, metadata=metadata)).status_code == 200
        answer = await post(app, "responses", metadata=metadata)
        assert answer.json()["metadata"] == metadata


async def test_a_stream_and_a_refusal_name_what_was_ignored_too(app: Starlette) -> None:
    messages = [USER | {"mood": "good"}]
    visit = asgi.Visit("/v1/chat/completions", {"messages": messages, "stream": True})
    assert (await visit.run(app)).headers["x-personae-ignored"] == "messages[].mood"
    refused = await post(app, messages=messages, max_tokens=0)
    assert (refused.status_code, ignored(refused)) == (400, ["messages[].mood"])


async def test_the_header_is_short_and_clean_whatever_the_client_sends(app: Starlette) -> None:
    strange = {f"x{i}\r\n: ü": 1 for i in range(200)} | {"y" * 5000: 1}
    response = await post(app, messages=[USER | strange])
    assert response.status_code == 200, response.text
    header = response.headers["x-personae-ignored"]
    assert len(header) < 1200
    assert header.endswith(", ...")
    assert header.isascii()
    assert "messages[].x0??:??" in header


async def test_a_repeated_request_without_unknown_keys_has_no_such_header(app: Starlette) -> None:
    assert ignored(await post(app, messages=[USER, {"role": "assistant", "content": "a"}, USER])) == []


NEUTRAL = [
    (name, value) for name, values in FOREIGN.items() if values is not ANY for value in (None, *values)
]


async def test_neutral_values_of_foreign_fields_are_accepted(app: Starlette, engine: FakeEngine) -> None:
    for name, value in [
        ("cache_prompt", True),
        ("typical_p", 1),
        ("typical_p", 1.0),
        ("dry_multiplier", 0.0),
        ("enable_thinking", False),
        ("verbosity", "low"),
        ("service_tier", "flex"),
        ("max_tokens", -1),
        ("max_completion_tokens", -1),
        *NEUTRAL,
    ]:
        response = await post(app, **{name: value})
        assert response.status_code == 200, (name, value, response.text)
        assert ignored(response) == []
    assert {log.params.max_tokens + len(log.tokens) for log in engine.submitted} == {4096}


async def test_all_foreign_fields_at_once_change_nothing_on_any_route(
    app: Starlette, engine: FakeEngine
) -> None:
    at_once = {
        name: 5 if values is ANY else values[0] if values else None for name, values in FOREIGN.items()
    }
    for path in ("chat/completions", "completions", "responses"):
        fields = at_once | ({"metadata": {}} if path != "completions" else {})
        if path == "responses":
            fields.pop("verbosity")
            fields["text"] = {"verbosity": "low"}
        response = await post(app, path, seed=3, **fields)
        assert response.status_code == 200, response.text
        assert (await post(app, path, seed=3)).status_code == 200
        with_them, without = engine.submitted[-2:]
        assert (with_them.tokens, with_them.params) == (without.tokens, without.params)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("typical_p", 0.9),
        ("dry_multiplier", 0.8),
        ("xtc_probability", 0.5),
        ("mirostat", 2),
        ("mirostat", True),
        ("watermark", True),
        ("no_repeat_ngram_size", 3),
        ("service_tier", "priority"),
        ("verbosity", "high"),
    ],
)
async def test_a_foreign_field_that_asks_for_something_is_refused_with_what_it_may_be(
    name: str, value: Any, app: Starlette
) -> None:
    response = await post(app, **{name: value})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")
    assert "it may only be null, " in error["message"]


async def test_the_server_may_ignore_unknown_fields_of_the_top_level(engine: FakeEngine) -> None:
    app = create_app(engine, ApiSettings(unknown_fields="ignore"))
    for path in ("chat/completions", "completions", "responses"):
        response = await post(app, path, weather="fine", dry_multiplier=0.8)
        assert response.status_code == 200, response.text
        assert ignored(response) == ["dry_multiplier", "weather"]
    inner = await post(app, response_format={"type": "text", "x": 1})
    assert inner.json()["error"]["param"] == "response_format.x"
    unserved = await post(app, use_beam_search=True)
    assert unserved.json()["error"]["param"] == "use_beam_search"


async def test_storing_is_accepted_and_the_answer_says_that_nothing_is_stored(app: Starlette) -> None:
    chat = await post(app, store=True)
    assert (chat.status_code, ignored(chat)) == (200, ["store"])
    response = await post(app, "responses", store=True)
    assert (response.json()["store"], ignored(response)) == (False, ["store"])
    assert ignored(await post(app, store=False)) == []


async def test_enable_thinking_is_obeyed_where_the_template_knows_it(
    app: Starlette, engine: FakeEngine
) -> None:
    for asked in (True, False):
        await post(app, enable_thinking=asked)
        await post(app, chat_template_kwargs={"enable_thinking": asked})
        one, other = engine.submitted[-2:]
        assert one.tokens == other.tokens
    assert engine.submitted[0].tokens != engine.submitted[2].tokens


async def test_enable_thinking_is_refused_where_it_could_not_be_obeyed() -> None:
    app = create_app(FakeEngine())
    assert (await post(app, enable_thinking=False)).status_code == 200
    refused = await post(app, enable_thinking=True)
    assert refused.json()["error"]["param"] == "enable_thinking"


async def test_the_description_says_what_is_ignored_and_what_is_neutral(app: Starlette) -> None:
    async with asgi.client(app) as client:
        described = (await client.get("/openapi.json")).json()
    schemas = described["components"]["schemas"]
    for open_one in ("UserMessage", "AssistantMessage", "PastToolCall", "FunctionTool", "MessageItem"):
        assert schemas[open_one].get("additionalProperties") is not False
    for strict in ("ChatRequest", "JsonSchema", "StructuredOutputs", "NamedTool"):
        assert schemas[strict]["additionalProperties"] is False
    fields = schemas["ChatRequest"]["properties"]
    assert fields["typical_p"]["enum"] == [None, 1]
    assert fields["service_tier"]["enum"] == [None, "auto", "default", "flex"]
    assert set(FOREIGN) <= set(fields)
    answer = described["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]
    assert "x-personae-ignored" in answer["headers"]


def test_foreign_fields_are_no_fields_of_our_own() -> None:
    ours = set(ChatRequest.__struct_fields__)
    assert set(FOREIGN) & ours == {"metadata", "service_tier", "store", "verbosity"}
    assert json.dumps([values for values in FOREIGN.values() if values is not ANY])
