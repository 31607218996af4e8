"""What `POST /v1/messages` refuses, by the client's names, and what it ignores and says so."""

import json
import re
from typing import Any

import asgi
import pytest
from fake_engine import FakeEngine, byte_tokenizer
from starlette.applications import Starlette
from tool_chat import TAGS, TEMPLATE

from personae.api.app import create_app
from personae.api.settings import ApiSettings

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
        (
            {
                "messages": [
                    *TALK,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "text", "text": "a"},
                            {"type": "tool_use", "id": "x", "name": "f", "input": {}},
                        ],
                    },
                ]
            },
            "messages[1]",
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


@pytest.mark.parametrize("keep", ["all", {"type": "all"}])
async def test_edits_of_the_context_that_clear_nothing_are_taken(keep: Any) -> None:
    app = create_app(FakeEngine())
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": keep}]}
    assert (await ask(app, context_management=edits)).status == 200
    count = "/v1/messages/count_tokens"
    assert (await ask(app, count, max_tokens="left out", context_management=edits)).status == 200


@pytest.mark.parametrize(
    "edit",
    [
        {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}},
        {"type": "clear_thinking_20251015"},
        {"type": "clear_tool_uses_20250919"},
    ],
)
async def test_edits_of_the_context_that_clear_something_are_refused(edit: dict[str, Any]) -> None:
    visit = await ask(create_app(FakeEngine()), context_management={"edits": [edit]})
    assert (visit.status, visit.error["param"]) == (400, "context_management")


async def test_who_asks_for_a_diagnosis_of_the_cache_is_answered_in_each_turn() -> None:
    app = create_app(FakeEngine())
    first = await ask(app, diagnostics={"previous_message_id": None})
    assert (first.status, "x-personae-ignored" in first.headers) == (200, False)
    second = await ask(app, diagnostics={"previous_message_id": "msg_1"})
    assert (second.status, second.headers["x-personae-ignored"]) == (200, "diagnostics")


async def test_the_block_that_counts_claude_codes_requests_is_not_in_the_prompt() -> None:
    engine = FakeEngine()
    app = create_app(engine)
    kept = {"type": "text", "text": "Be brief."}
    counts = [{"type": "text", "text": f"x-anthropic-billing-header: cch={n};"} for n in ("36ee5", "0aaa9")]
    visits = [await ask(app, system=system) for system in ([counts[0], kept], [counts[1], kept], [kept])]
    assert [visit.status for visit in visits] == [200] * 3
    assert engine.submitted[0].tokens == engine.submitted[1].tokens == engine.submitted[2].tokens
    assert [visit.headers.get("x-personae-ignored") for visit in visits] == [
        *["system[].x-anthropic-billing-header"] * 2,
        None,
    ]
    path = "/v1/messages/count_tokens"
    ways = [
        await ask(app, path, max_tokens="left out", system=system)
        for system in ([counts[0], kept], [kept], [counts[0]], "left out")
    ]
    tokens = [json.loads(b"".join(visit.chunks))["input_tokens"] for visit in ways]
    assert tokens[0] == tokens[1] > tokens[2] == tokens[3]


async def test_max_tokens_over_the_context_become_what_fits_and_a_header_says_so() -> None:
    engine = FakeEngine()
    visit = await ask(create_app(engine), max_tokens=32_000)
    assert visit.status == 200, visit.chunks
    (log,) = engine.submitted
    left = engine.max_model_len - log.prompt_length
    assert log.params.max_tokens == left
    assert visit.headers["x-personae-max-tokens"] == str(left)
    fits = await ask(create_app(engine), max_tokens=left)
    assert "x-personae-max-tokens" not in fits.headers


async def test_claude_code_finds_the_numbers_in_errors_about_the_context() -> None:
    """With the expressions by which it looks for them."""
    engine = FakeEngine()
    app = create_app(engine, ApiSettings(max_tokens_overflow="refuse"))
    visit = await ask(app, max_tokens=32_000)
    assert (visit.status, visit.error["param"]) == (400, "max_tokens")
    sizes = re.search(
        r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)", visit.error["message"]
    )
    assert sizes is not None, visit.error
    assert (sizes[2], sizes[3]) == ("32000", "512")
    fits = await ask(app, max_tokens=512 - int(sizes[1]))
    assert fits.status == 200
    for length in (600, 100_000):
        visit = await ask(app, messages=[{"role": "user", "content": "x" * length}])
        assert (visit.status, visit.error["param"]) == (400, "messages")
        sizes = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", visit.error["message"])
        assert sizes is not None, visit.error
        assert int(sizes[1]) > int(sizes[2]) == 512


async def test_a_tool_may_have_a_name_of_128_characters_and_there_may_be_many() -> None:
    app = create_app(FakeEngine(tokenizer=byte_tokenizer(TEMPLATE, TAGS), max_model_len=2**17))
    named = [TOOL | {"name": name} for name in ("n" * 128, "n" * 129)]
    assert (await ask(app, tools=named[:1])).status == 200
    visit = await ask(app, tools=named[1:])
    assert (visit.status, visit.error["param"]) == (400, "tools[0].name")
    many = [TOOL | {"name": f"tool_{number}"} for number in range(1025)]
    assert (await ask(app, tools=many[:259])).status == 200
    count = "/v1/messages/count_tokens"
    assert (await ask(app, count, max_tokens="left out", tools=many[:259])).status == 200
    visit = await ask(app, tools=many)
    assert (visit.status, visit.error["param"]) == (400, "tools")


async def test_text_that_was_joined_with_claude_codes_count_stays_in_the_prompt() -> None:
    engine = FakeEngine()
    app = create_app(engine)
    joined = "x-anthropic-billing-header: cc_version=2; cch=36ee5;\nBe brief."
    for system in (joined, [{"type": "text", "text": joined}], "Be brief."):
        assert (await ask(app, system=system)).status == 200
    first, second, plain = engine.submitted
    assert first.tokens == second.tokens == plain.tokens


@pytest.mark.parametrize(
    "source",
    [
        {"type": "text", "media_type": "text/plain", "data": "A note."},
        {"type": "content", "content": "A note."},
        {"type": "content", "content": [{"type": "text", "text": "A note."}]},
    ],
)
async def test_a_document_of_text_is_in_the_prompt(source: dict[str, Any]) -> None:
    engine = FakeEngine()
    app = create_app(engine)
    document = {"type": "document", "source": source, "title": "Title", "citations": {"enabled": False}}
    whole = {"type": "text", "text": "Title\nA note."}
    for block in (document, whole):
        assert (await ask(app, messages=[{"role": "user", "content": [block]}])).status == 200
    assert engine.submitted[0].tokens == engine.submitted[1].tokens


async def test_a_document_that_is_not_text_is_refused_by_its_place() -> None:
    for source in (
        {"type": "base64", "media_type": "application/pdf", "data": "aa"},
        {"type": "url", "url": "u"},
    ):
        blocks = [{"type": "document", "source": source}]
        visit = await ask(create_app(FakeEngine()), messages=[{"role": "user", "content": blocks}])
        assert (visit.status, visit.error["param"]) == (400, "messages[0].content[0].type")


async def test_a_search_result_is_in_the_prompt_with_its_title_and_source() -> None:
    engine = FakeEngine()
    app = create_app(engine)
    found = {
        "type": "search_result",
        "title": "Title",
        "source": "https://example.com",
        "content": [{"type": "text", "text": "A note."}, {"type": "text", "text": "Another."}],
        "citations": {"enabled": True},
    }
    whole = {"type": "text", "text": "Title\nhttps://example.com\nA note.\nAnother."}
    call = {"type": "tool_use", "id": "toolu_1", "name": "search", "input": {}}
    for block in (found, whole):
        assert (await ask(app, messages=[{"role": "user", "content": [block]}])).status == 200
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [block]}
        turns = [("user", "Search."), ("assistant", [call]), ("user", [result])]
        messages = [{"role": role, "content": content} for role, content in turns]
        assert (await ask(app, messages=messages)).status == 200
    assert engine.submitted[0].tokens == engine.submitted[2].tokens
    assert engine.submitted[1].tokens == engine.submitted[3].tokens
