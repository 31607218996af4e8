"""Tools with chat templates that know none: described by the server, called in the generic format."""

import json
from dataclasses import replace
from typing import Any

import asgi
import pytest
from fake_engine import CHATML, FakeEngine, byte_tokenizer
from tool_chat import TIME, WEATHER, call, tool

from personae.api.app import create_app
from personae.api.family import Family
from personae.api.settings import ApiSettings
from personae.api.templates.rewrite import rewritten
from personae.api.templates.template import ChatTemplate
from personae.api.templates.tool_text import describe
from personae.api.templates.traits import TemplateTraits
from personae.errors import RequestError
from personae.grammar.tools.registry import GENERIC, tool_format

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "hi"}
KOELN, CLOCK = call("get_weather", city="Köln"), call("get_time")
NO_SYSTEM = (
    "{% for message in messages %}{% if message.role not in ('user', 'assistant') %}"
    "{{ raise_exception('no ' ~ message.role) }}{% endif %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}{% endfor %}"
)
HISTORY: list[dict[str, Any]] = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'},
            },
            {"id": "2", "type": "function", "function": {"name": "get_time", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
    {"role": "tool", "tool_call_id": "2", "content": "noon"},
    {"role": "user", "content": "And now?"},
]


def engine_of(answer: str, template: str = CHATML) -> FakeEngine:
    return FakeEngine(answer, tokenizer=byte_tokenizer(template), max_model_len=8192)


def prompt_of(engine: FakeEngine) -> str:
    log = engine.submitted[-1]
    return engine.tokenizer.decode(log.tokens[: log.prompt_length], skip_special_tokens=False)


async def ask(engine: FakeEngine, **extra: Any) -> asgi.Visit:
    body = {"model": "base", "messages": [USER], "tools": [WEATHER, TIME], **extra}
    return await asgi.Visit("/v1/chat/completions", body).run(create_app(engine))


async def message_of(engine: FakeEngine, **extra: Any) -> dict[str, Any]:
    visit = await ask(engine, **extra)
    assert visit.status == 200, visit.chunks
    message: dict[str, Any] = json.loads(b"".join(visit.chunks))["choices"][0]["message"]
    return message


def called(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [one["function"] for one in message.get("tool_calls") or ()]
    return [(one["name"], json.loads(one["arguments"])) for one in functions]


def test_parameters_are_declared_as_typescript_would_and_the_rest_stays_json() -> None:
    properties: dict[str, Any] = {
        "city": {"type": "string", "description": "The\n city.", "minLength": 2},
        "unit": {"enum": ["C", "F"], "default": "C"},
        "days": {"type": ["integer", "null"]},
        "tags": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
        "at": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
        "any": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/thing"}]},
        "free": {},
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["city"],
        "$defs": {"thing": {"type": "null"}},
    }
    shown = describe(
        [{"function": {"name": "look", "description": "Looks.", "parameters": schema}}], tool_format(GENERIC)
    )
    assert shown.split("\n\n")[-1] == (
        "look: Looks.\n{\n"
        '"city": string, // The city. {"minLength": 2}\n'
        '"unit"?: "C" | "F", // Default: "C".\n'
        '"days"?: integer | null,\n'
        '"tags"?: ("a" | "b")[],\n'
        '"at"?: {"x": number},\n'
        '"any"?: string | {"$ref": "#/$defs/thing"},\n'
        '"free"?: any,\n'
        '} // {"$defs": {"thing": {"type": "null"}}}'
    )
    odd = [
        {"function": {"name": "f", "parameters": {"anyOf": [{"type": "object"}]}}},
        {"function": {"name": "g"}},
    ]
    assert describe(odd, tool_format(GENERIC)).endswith('f\n{"anyOf": [{"type": "object"}]}\n\ng\n{}')


def test_a_schema_that_nests_deeper_than_anybody_reads_is_written_as_json() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(60):
        schema = {"type": "object", "properties": {"a": schema}}
    assert '{"type": "object"' in describe(
        [{"function": {"name": "f", "parameters": schema}}], tool_format(GENERIC)
    )


@pytest.mark.parametrize("template", [CHATML, NO_SYSTEM], ids=["chatml", "no system, strict turns"])
async def test_the_prompt_has_the_tools_and_earlier_calls_and_results_as_text(template: str) -> None:
    engine = engine_of("fine", template)
    assert (await message_of(engine, messages=HISTORY))["content"] == "fine"
    prompt = prompt_of(engine)
    assert (
        prompt.index("get_weather: Calls get_weather.")
        < prompt.index("get_time: Calls")
        < prompt.index("\nhi")
    )
    assert (
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}}</tool_call>\n<tool_call>' in prompt
    )
    assert "<tool_response>rain</tool_response>\n<tool_response>noon</tool_response>\nAnd now?" in prompt


async def test_the_callers_system_message_stays_before_the_tools() -> None:
    engine = engine_of("fine")
    await message_of(engine, messages=[{"role": "developer", "content": "Be brief."}, USER])
    assert prompt_of(engine).startswith("<|im_start|>system\nBe brief.\n\nYou can call tools.")
    engine = engine_of("fine")
    await message_of(engine, tools=None)
    assert prompt_of(engine).startswith("<|im_start|>user\nhi")


def test_a_message_that_only_calls_gets_a_system_message_only_for_tools() -> None:
    traits = TemplateTraits(tools="described", calls="as text")
    generic = tool_format(GENERIC)
    assert rewritten([USER], None, traits, generic) == ([USER], None)
    without_system = replace(traits, system="in the user's message")
    [message], tools = rewritten([], [{"function": {"name": "f"}}], without_system, generic)
    assert (message["role"], tools) == ("user", None)


async def test_text_one_call_and_several_come_apart_streamed_or_not() -> None:
    for answer, content, calls in (
        ("Hello.", "Hello.", []),
        (KOELN, None, [("get_weather", {"city": "Köln"})]),
        (f"Look:\n{KOELN}\n{CLOCK}", "Look:", [("get_weather", {"city": "Köln"}), ("get_time", {})]),
    ):
        engine = engine_of(answer)
        message = await message_of(engine)
        assert ((message["content"] or "").strip() or None, called(message)) == (content, calls)
        for burst in (1, 3, 1000):
            engine.burst = burst
            streamed, names, arguments = "", [], {}
            for event in (await ask(engine, stream=True)).events():
                for part in event["choices"] if event != "[DONE]" else ():
                    streamed += part["delta"].get("content") or ""
                    for one in part["delta"].get("tool_calls", ()):
                        names += [name] if (name := one["function"].get("name")) else []
                        index = one["index"]
                        arguments[index] = arguments.get(index, "") + one["function"].get("arguments", "")
            assert streamed == (message["content"] or "")
            assert [(name, json.loads(arguments[at])) for at, name in enumerate(names)] == calls


async def test_choice_strictness_and_parallel_calls_bind_the_answer_as_with_any_format() -> None:
    generic, hermes = engine_of(KOELN), engine_of(KOELN)
    app = create_app(hermes, ApiSettings(tool_format="hermes"))
    strict = tool("get_weather", strict=True, city={"type": "string", "enum": ["Köln", "Bonn"]})
    named = {"type": "function", "function": {"name": "get_weather"}}
    for extra in (
        {},
        {"tool_choice": "required"},
        {"tool_choice": "none"},
        {"tool_choice": named},
        {"parallel_tool_calls": False},
        {"tools": [strict], "tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
    ):
        await message_of(generic, **extra)
        body = {"model": "base", "messages": [USER], "tools": [WEATHER, TIME], **extra}
        assert (await asgi.Visit("/v1/chat/completions", body).run(app)).status == 200
        assert generic.submitted[-1].grammar is not None
        assert generic.submitted[-1].grammar == hermes.submitted[-1].grammar, extra


@pytest.mark.parametrize("required", [[{"name": "a"}], [["a"]], 5, {"a": 1}, None])
def test_a_malformed_list_of_required_names_is_described_so_that_the_schemas_check_can_name_it(
    required: Any,
) -> None:
    inner = {"type": "object", "properties": {"b": {"type": "string"}}, "required": required}
    parameters = inner | {"properties": {"b": inner}}
    malformed = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert '"b"?: {"b"?: string}' in describe([malformed], tool_format(GENERIC))


async def test_the_description_of_tools_counts_for_the_context() -> None:
    engine = FakeEngine("no", tokenizer=byte_tokenizer(), max_model_len=256)
    visit = await ask(engine)
    assert visit.status == 400
    assert "context" in visit.error["message"]


def test_it_is_detected_where_the_template_is_given_no_tools() -> None:
    for template, name in (
        (CHATML, "generic"),
        (CHATML + "{# tools #}", "generic"),
        (CHATML + "{% if tools %}{{ tools }}{% endif %}", None),
        (CHATML + '{# <tool_call>{"name": 1, "arguments": 2} #}', "hermes"),
    ):
        described = ChatTemplate(template, {}).traits.tools == "described"
        assert described is (name is not None)
        found = Family.of(byte_tokenizer(template)).tools
        assert (found and found.name) == name
    assert Family.of(byte_tokenizer(None)).tools is None
    assert Family.of(byte_tokenizer(), "none").tools is None


async def test_named_it_describes_tools_also_where_the_template_would() -> None:
    engine = engine_of(KOELN, CHATML + "{% if tools %}{{ raise_exception('seen') }}{% endif %}")
    app = create_app(engine, ApiSettings(tool_format="generic"))
    body = {"model": "base", "messages": [USER], "tools": [WEATHER]}
    assert (await asgi.Visit("/v1/chat/completions", body).run(app)).status == 200
    assert "get_weather: Calls" in prompt_of(engine)


def test_with_tools_off_a_template_that_fails_is_refused_as_ever() -> None:
    family = Family.of(byte_tokenizer(NO_SYSTEM), "none")
    with pytest.raises(RequestError):
        family.render([], add_generation_prompt=True, kwargs={"messages": []})


async def test_a_requests_own_template_shows_tools_or_has_them_described() -> None:
    engine = engine_of(KOELN)
    app = create_app(engine, ApiSettings(trust_request_chat_template=True))
    shows = "{% for one in tools or [] %}<{{ one | tojson }}>{% endfor %}" + CHATML
    for template, sign in ((shows, '<{"type": "function"'), (CHATML, "get_weather: Calls get_weather.")):
        body = {"model": "base", "messages": [USER], "tools": [WEATHER], "chat_template": template}
        assert (await asgi.Visit("/v1/chat/completions", body).run(app)).status == 200
        assert sign in prompt_of(engine)
