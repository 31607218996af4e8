"""What binds the text of an answer: `structured_outputs`, its older names, structural tags; both routes."""

import json
from typing import Any

import asgi
import pytest
from fake_engine import FakeEngine, byte_tokenizer
from starlette.applications import Starlette
from tool_chat import TAGS, TEMPLATE, WEATHER

from personae.api.app import create_app
from personae.api.settings import ApiSettings
from personae.errors import GrammarError
from personae.grammar import registry
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.elements import Concat, Json, Regex, Until, decode_structure

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SOURCE = json.dumps(SCHEMA, separators=(",", ":"))
GBNF = 'root ::= "yes" | "no"'
LARK = 'start: "yes" | "no"'
TAG = {"begin": "<a>", "schema": SCHEMA, "end": "</a>"}


async def spec_of(app: Starlette, engine: FakeEngine, path: str, **extra: Any) -> GrammarSpec:
    fields = {"messages": [USER]} if "chat" in path else {"prompt": "hi"}
    async with asgi.client(app) as client:
        response = await client.post(path, json={"model": "base", **fields, **extra})
    assert response.status_code == 200, response.text
    grammar = engine.submitted[-1].grammar
    assert grammar is not None
    return grammar


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("asked", "spec"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, GrammarSpec("json_schema", SOURCE)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, GrammarSpec("json_schema", SOURCE)),
        ({"structured_outputs": {"json_object": True}}, GrammarSpec("json_object")),
        ({"structured_outputs": {"regex": "a+"}}, GrammarSpec("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarSpec("choice", '["a","b"]')),
        ({"structured_outputs": {"grammar": GBNF}}, GrammarSpec("ebnf", GBNF)),
        ({"structured_outputs": {"grammar": LARK}}, GrammarSpec("lark", LARK)),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": False}}, GrammarSpec("regex", "a")),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, GrammarSpec("regex", "a")),
        (
            {"structured_outputs": {"json": SCHEMA}, "property_order": "any"},
            GrammarSpec("json_schema", SOURCE, any_order=True),
        ),
        ({"guided_json": SCHEMA, "property_order": "schema"}, GrammarSpec("json_schema", SOURCE)),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            GrammarSpec("json_schema", SOURCE, compact=True),
        ),
        (
            {"guided_json": SCHEMA, "structured_outputs": {"disable_any_whitespace": True}},
            GrammarSpec("json_schema", SOURCE, compact=True),
        ),
        (
            {
                "response_format": {"type": "json_object"},
                "structured_outputs": {"disable_any_whitespace": True},
            },
            GrammarSpec("json_object", compact=True),
        ),
        ({"guided_json": SCHEMA}, GrammarSpec("json_schema", SOURCE)),
        ({"guided_regex": "a+", "guided_decoding_backend": "auto"}, GrammarSpec("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, GrammarSpec("choice", '["a","b"]')),
        (
            {"guided_regex": "a+", "guided_decoding_backend": "outlines"},
            GrammarSpec("regex", "a+", backend="outlines"),
        ),
        (
            {"structured_outputs": {"choice": ["a"]}, "guided_decoding_backend": "guidance"},
            GrammarSpec("choice", '["a"]', backend="llguidance"),
        ),
        ({"guided_grammar": GBNF}, GrammarSpec("ebnf", GBNF)),
        (
            {"structured_outputs": {"grammar": LARK}, "guided_grammar": LARK},
            GrammarSpec("lark", LARK),
        ),
    ],
    ids=str,
)
async def test_every_spelling_becomes_the_same_spec(
    app: Starlette, engine: FakeEngine, path: str, asked: dict[str, Any], spec: GrammarSpec
) -> None:
    assert await spec_of(app, engine, path, **asked) == spec


async def test_a_structural_tag_is_the_same_in_both_forms_and_fields(
    app: Starlette, engine: FakeEngine
) -> None:
    tag = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": SCHEMA}}
    newer = {"format": {"type": "triggered_tags", "triggers": ["<a"], "tags": [{**tag, "end": "</a>"}]}}
    older = {"structures": [TAG], "triggers": ["<a"]}
    sources = set()
    for form in (newer, older):
        for asked in (
            {"response_format": {"type": "structural_tag", **form}},
            {"structured_outputs": {"structural_tag": {"type": "structural_tag", **form}}},
            {"structured_outputs": {"structural_tag": json.dumps(form)}},
        ):
            spec = await spec_of(app, engine, "/v1/chat/completions", **asked)
            assert spec.kind == "structure"
            param = next(iter(asked))
            if param == "structured_outputs":
                param += ".structural_tag"
            assert json.dumps(param) in spec.source, "an error would name this field"
            sources.add(spec.source.replace(param, "x"))
    assert len(sources) == 1


async def test_what_binds_the_text_begins_after_reasoning_and_stands_beside_tools() -> None:
    engine = FakeEngine("hm</think>a", tokenizer=byte_tokenizer(TEMPLATE, TAGS), max_model_len=4096)
    app = create_app(engine)
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    spec = await spec_of(app, engine, "/v1/chat/completions", guided_regex="a+", **thinking)
    element = decode_structure(spec.source)
    assert isinstance(element, Concat)
    assert element.parts[0] == Until("</think>")
    assert isinstance(element.parts[1], Concat)
    assert element.parts[1].parts[-1] == Regex("a+", "guided_regex")
    engine.answer = "yes"
    extra = {"tools": [WEATHER], "structured_outputs": {"grammar": GBNF}}
    spec = await spec_of(app, engine, "/v1/chat/completions", **extra)
    assert "structured_outputs.grammar" in spec.source
    assert "get_weather" in spec.source
    spec = await spec_of(app, engine, "/v1/chat/completions", guided_json=SCHEMA, tools=[WEATHER])
    assert json.dumps("guided_json") in spec.source
    assert Json(SCHEMA, True, "guided_json").param == "guided_json"


async def test_a_server_that_writes_no_blanks_writes_none_in_calls_either_unless_a_request_says_so() -> None:
    engine = FakeEngine("hm", tokenizer=byte_tokenizer(TEMPLATE, TAGS), max_model_len=4096)
    app = create_app(engine, ApiSettings(disable_any_whitespace=True))
    path = "/v1/chat/completions"
    free = {"structured_outputs": {"disable_any_whitespace": False}}
    for asked in ({"guided_json": SCHEMA}, {"tools": [WEATHER]}):
        assert '"compact":true' in (await spec_of(app, engine, path, **asked)).source
        assert "compact" not in (await spec_of(app, engine, path, **asked, **free)).source


async def test_a_server_in_any_order_writes_properties_so_in_calls_too_unless_a_request_says_otherwise() -> (
    None
):
    engine = FakeEngine("hm", tokenizer=byte_tokenizer(TEMPLATE, TAGS), max_model_len=4096)
    app = create_app(engine, ApiSettings(property_order="any"))
    path = "/v1/chat/completions"
    for asked in ({"guided_json": SCHEMA}, {"tools": [WEATHER]}):
        assert '"any_order":true' in (await spec_of(app, engine, path, **asked)).source
        in_order = await spec_of(app, engine, path, property_order="schema", **asked)
        assert "any_order" not in in_order.source
        assert not in_order.any_order
    free = await asgi.Visit(path, {"model": "base", "messages": [USER]}).run(app)
    assert free.status == 200


async def test_a_backend_may_be_asked_for_beside_tools_alone() -> None:
    engine = FakeEngine("hm", tokenizer=byte_tokenizer(TEMPLATE, TAGS), max_model_len=4096)
    app = create_app(engine)
    path, tools = "/v1/chat/completions", {"tools": [WEATHER]}
    spec = await spec_of(app, engine, path, guided_decoding_backend="auto", **tools)
    assert (spec.kind, spec.backend) == ("structure", None)
    spec = await spec_of(app, engine, path, guided_decoding_backend="guidance", **tools)
    assert (spec.kind, spec.backend) == ("structure", "llguidance")
    body = {"model": "base", "messages": [USER], "guided_decoding_backend": "xgrammar"}
    for extra in (tools, {"guided_grammar": GBNF, **tools}):
        visit = await asgi.Visit(path, {**body, **extra}).run(app)
        assert visit.error["param"] == "guided_decoding_backend"
        assert visit.error["message"].endswith("with tools, reasoning or a structural tag; guidance does.")


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"guided_regex": "a"}, "guided_regex"),
        ({"guided_json": {}}, "guided_json"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs.json"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_what_the_compiler_refuses_is_named_as_the_caller_wrote_it(
    app: Starlette, engine: FakeEngine, path: str, asked: dict[str, Any], param: str
) -> None:
    fields = {"messages": [USER]} if "chat" in path else {"prompt": "hi"}
    for own in (None, "response_format.json_schema.schema", "structured_outputs.regex"):
        engine.refuse_late = GrammarError("no", param=own)
        visit = await asgi.Visit(path, {"model": "base", **fields, **asked}).run(app)
        assert (visit.status, visit.error["param"]) == (400, param)


NOT_WHOLLY = {"type": "array", "items": {"type": "object"}, "uniqueItems": True}


@pytest.mark.parametrize("default", [False, True])
@pytest.mark.parametrize("said", [None, False, True])
async def test_strict_is_what_the_request_says_or_else_the_server(default: bool, said: bool | None) -> None:
    engine = FakeEngine("[]", tokenizer=byte_tokenizer(TEMPLATE, TAGS), max_model_len=4096)
    app = create_app(engine, ApiSettings(default_strict=default))
    strict = default if said is None else said
    named = {"name": "x", "schema": NOT_WHOLLY, **({} if said is None else {"strict": said})}
    format = {"type": "json_schema", "json_schema": named}
    assert (await spec_of(app, engine, "/v1/completions", response_format=format)).strict is strict
    spec = await spec_of(app, engine, "/v1/chat/completions", response_format=format)
    assert f'"strict":{json.dumps(strict)}' in spec.source
    flag = {} if said is None else {"strict": said}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, **flag}}
    spec = await spec_of(app, engine, "/v1/chat/completions", tools=[tool], tool_choice="required")
    assert f'"strict":{json.dumps(strict)}' in spec.source


async def test_without_strict_the_finished_answer_is_checked() -> None:
    engine = FakeEngine('["a","a"]', tokenizer=byte_tokenizer(TEMPLATE, TAGS), max_model_len=4096)
    body = {
        "model": "base",
        "messages": [USER],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": NOT_WHOLLY}},
    }
    async with asgi.client(create_app(engine)) as client:
        [choice] = (await client.post("/v1/chat/completions", json=body)).json()["choices"]
    assert choice["personae"]["validation"]["valid"] is False


async def test_a_header_names_what_of_a_schema_is_another_tools_and_binds_nothing() -> None:
    engine = FakeEngine("{}", tokenizer=byte_tokenizer(TEMPLATE, TAGS), max_model_len=4096)
    schema = {"type": "object", "properties": {"id": {"type": "string", "format": "ulid"}}}
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    async with asgi.client(create_app(engine)) as client:
        body = {"model": "base", "messages": [USER]}
        plain = await client.post("/v1/chat/completions", json=body)
        delivered = await client.post("/v1/chat/completions", json=body | {"response_format": format})
    assert "x-personae-ignored" not in plain.headers
    place = "response_format.json_schema.schema#/properties/id/format"
    assert delivered.headers["x-personae-ignored"] == place


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_gbnf_without_xgrammar_is_refused_with_what_to_install(
    path: str, app: Starlette, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("personae.grammar.registry.find_spec", lambda name: None)
    registry.missing.cache_clear()
    try:
        fields = {"messages": [USER]} if "chat" in path else {"prompt": "hi"}
        async with asgi.client(app) as client:
            asked = {"model": "base", **fields, "structured_outputs": {"grammar": GBNF}}
            refused = await client.post(path, json=asked)
            asked["structured_outputs"] = {"grammar": LARK}
            answered = await client.post(path, json=asked)
    finally:
        registry.missing.cache_clear()
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "structured_outputs.grammar"
    assert "pip install xgrammar" in refused.json()["error"]["message"]
    assert answered.status_code == 200, answered.text
