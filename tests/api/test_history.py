"""Conversations as other servers and older clients have left them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asgi
import msgspec
import pytest
from fake_engine import FakeEngine, byte_tokenizer
from starlette.applications import Starlette
from tool_chat import TAGS, TEMPLATE, WEATHER

from personae.api.app import create_app
from personae.api.templates.template import ChatTemplate
from personae.api.wire.conversation import Message
from personae.errors import RequestError
from personae.grammar.spec import GrammarSpec

pytestmark = pytest.mark.anyio
SHARED = "shared/data/tokenizers/chat_templates"  # beside the repository or above it
TEMPLATES = [path for parent in Path(__file__).parents for path in sorted((parent / SHARED).glob("*.jinja"))]
USER = {"role": "user", "content": "hi"}
MALFORMED = ['{"a": 1', "[]", "null", "3", '"text"', "not JSON", "{'a': 1}", r'{"a": "\ud83d"}']
BY_ONE = (
    "{{ tools or '' }}"
    "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<{{ c.function.name }}>{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"
    "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}{% endfor %}\n{% endfor %}"
)


def app_of(template: str = TEMPLATE) -> tuple[FakeEngine, Starlette]:
    engine = FakeEngine(tokenizer=byte_tokenizer(template, TAGS), max_model_len=4096)
    return engine, create_app(engine)


def called(arguments: str) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


async def prompt(template: str, messages: list[Any], **fields: Any) -> str:
    engine, app = app_of(template)
    async with asgi.client(app) as client:
        response = await client.post("/v1/chat/completions", json={"messages": messages, **fields})
    assert response.status_code == 200, response.text
    return engine.tokenizer.decode(engine.submitted[0].tokens, skip_special_tokens=False)


@pytest.mark.parametrize("arguments", MALFORMED)
async def test_malformed_arguments_of_an_earlier_call_are_shown_as_they_are(arguments: str) -> None:
    messages = [USER, called(arguments), {"role": "tool", "tool_call_id": "a", "content": "No JSON!"}]
    shown = await prompt(TEMPLATE, messages, tools=[WEATHER])
    assert f'"arguments": {arguments}}}\n</tool_call>' in shown
    one_by_one = await prompt(BY_ONE, messages)
    assert f"<get_weather>arguments={arguments};arguments={arguments};" in one_by_one


async def test_well_formed_arguments_are_an_object_for_the_template() -> None:
    messages = [USER, called('{"city": "Cologne"}')]
    assert "<get_weather>city=Cologne;city=Cologne;" in await prompt(BY_ONE, messages)


def refusals(template: Path) -> Iterator[str]:
    """Which malformed arguments a model's template does not show."""
    source = template.read_text(encoding="utf-8")
    tools = [{"type": "function", "function": WEATHER["function"]}]
    for arguments in MALFORMED[:2]:
        talk = [USER, called(arguments), {"role": "tool", "tool_call_id": "a", "content": "No."}, USER]
        well = [USER, called('{"city": "Cologne"}'), *talk[2:]]
        render = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render
        try:
            shows = "Cologne" in render(msgspec.convert(well, list[Message]), tools=tools)
        except RequestError:
            shows = False  # it refuses such a conversation
        if not shows:
            continue
        shown = render(msgspec.convert(talk, list[Message]), tools=tools)
        if arguments not in shown and json.dumps(arguments) not in shown:
            yield arguments


@pytest.mark.skipif(not TEMPLATES, reason="no templates of models here")
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_the_templates_of_models_show_malformed_arguments(template: Path) -> None:
    assert list(refusals(template)) == []


async def test_a_call_without_text_does_for_a_template_that_needs_text() -> None:
    needy = (
        "{{ tools or '' }}"
        "{% for m in messages %}{{ m.content | trim }}{% if m.content + 'x' %}|{% endif %}"
        "{{ m.tool_calls or '' }}{% endfor %}"
    )
    assert (await prompt(needy, [USER, called("{}")])).startswith("hi||[{")


async def test_functions_of_before_there_were_tools_are_understood() -> None:
    older = [
        USER,
        {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "look", "content": "rain"},
    ]
    newer = [
        USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "function": {"name": "look", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
    ]
    assert await prompt(TEMPLATE, older) == await prompt(TEMPLATE, newer)


async def test_a_message_of_reasoning_alone_is_taken_back() -> None:
    shown = await prompt(TEMPLATE, [USER, {"role": "assistant", "reasoning_content": "Hm."}, USER])
    assert "<think>Hm.</think><|im_end|>" in shown


async def test_a_schema_may_stand_beside_json_object_and_needs_no_name() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    engine = FakeEngine()
    app = create_app(engine)
    engine.answer = '{"a": 1}'
    formats = [
        {"type": "json_object", "schema": schema},
        {"type": "json_schema", "json_schema": {"schema": schema}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    ]
    async with asgi.client(app) as client:
        for format in formats:
            body = {"messages": [USER], "response_format": format}
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
        refused = await client.post(
            "/v1/chat/completions",
            json={"messages": [USER], "response_format": {"type": "json_object", "schema": False}},
        )
    source = json.dumps(schema, separators=(",", ":"))
    assert [log.grammar for log in engine.submitted] == [GrammarSpec("json_schema", source, strict=False)] * 3
    assert refused.json()["error"]["param"] == "response_format.schema"
