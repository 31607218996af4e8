"""Custom tools: their input is text, free or of a grammar."""

import json
from typing import Any

import asgi
import pytest
from fake_engine import FakeEngine, byte_tokenizer
from live_server import serving
from openai_client import openai_client
from starlette.applications import Starlette
from tool_chat import TAGS, TEMPLATE, TIME, call

from personae.api.app import create_app
from personae.grammar.structure.elements import decode_structure

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "hi"}
SHELL: dict[str, Any] = {"type": "custom", "custom": {"name": "shell", "description": "Runs a command."}}


def bound(syntax: str, definition: str) -> dict[str, Any]:
    grammar = {"syntax": syntax, "definition": definition}
    return {"type": "custom", "custom": {"name": "f", "format": {"type": "grammar", "grammar": grammar}}}


@pytest.fixture
def engine() -> FakeEngine:
    answer = call("shell", input='echo "ü"\n')
    return FakeEngine(answer, tokenizer=byte_tokenizer(TEMPLATE, TAGS), max_model_len=4096)


@pytest.fixture
def app(engine: FakeEngine) -> Starlette:
    return create_app(engine)


async def ask(app: Starlette, **extra: Any) -> asgi.Visit:
    body = {"model": "base", "messages": [USER], "tools": [SHELL, TIME], **extra}
    return await asgi.Visit("/v1/chat/completions", body).run(app)


async def test_the_input_comes_as_text(app: Starlette, engine: FakeEngine) -> None:
    choice = json.loads(b"".join((await ask(app)).chunks))["choices"][0]
    [one] = choice["message"]["tool_calls"]
    assert one == {"id": one["id"], "type": "custom", "custom": {"name": "shell", "input": 'echo "ü"\n'}}
    assert choice["finish_reason"] == "tool_calls"
    assert "personae" not in choice


@pytest.mark.parametrize("burst", [1, 2, 7, 300])
async def test_the_input_is_streamed_as_text(app: Starlette, engine: FakeEngine, burst: int) -> None:
    engine.burst = burst
    text, pieces = "", []
    for event in (await ask(app, stream=True)).events():
        for choice in event["choices"] if event != "[DONE]" else ():
            for one in choice["delta"].get("tool_calls", ()):
                assert "function" not in one
                pieces.append(one)
                text += one["custom"].get("input", "")
    assert text == 'echo "ü"\n'
    assert (pieces[0]["type"], pieces[0]["custom"]["name"]) == ("custom", "shell")
    assert all(piece.keys() == {"index", "custom"} for piece in pieces[1:])


async def test_the_template_sees_a_function_of_one_string_and_its_calls(
    app: Starlette, engine: FakeEngine
) -> None:
    asked = {"id": "call_1", "type": "custom", "custom": {"name": "shell", "input": 'say "x"'}}
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [asked]},
        {"role": "tool", "tool_call_id": "call_1", "content": "x"},
    ]
    assert (await ask(app, messages=history)).status == 200
    prompt = engine.tokenizer.decode(engine.submitted[-1].tokens, skip_special_tokens=False)
    assert '{"name": "shell", "arguments": {"input": "say \\"x\\""}}' in prompt
    assert '"description": "Runs a command."' in prompt
    assert '"required": ["input"]' in prompt


async def test_a_custom_tool_is_chosen_by_its_kind_and_name(app: Starlette, engine: FakeEngine) -> None:
    named = {"type": "custom", "custom": {"name": "shell"}}
    for choice in (
        named,
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}},
    ):
        assert (await ask(app, tool_choice=choice)).status == 200
        grammar = engine.submitted[-1].grammar
        assert grammar is not None
        assert "shell" in grammar.source
        assert "get_time" not in grammar.source
    wrong = await ask(app, tool_choice={"type": "function", "function": {"name": "shell"}})
    assert (wrong.status, wrong.error["param"]) == (400, "tool_choice.function.name")


async def test_a_grammar_binds_the_input(app: Starlette, engine: FakeEngine) -> None:
    for syntax, definition in (("regex", "a+"), ("lark", 'start: "a"+')):
        assert (await ask(app, tools=[bound(syntax, definition)])).status == 200
        grammar = engine.submitted[-1].grammar
        assert grammar is not None
        decode_structure(grammar.source)
        assert "tools[0].custom.format.grammar.definition" in grammar.source
    wrong = await ask(app, tools=[bound("lark", "start: ~/a/")])
    assert (wrong.status, wrong.error["param"]) == (400, "tools[0].custom.format.grammar.definition")
    wrong = await ask(app, tools=[bound("yacc", "a")])
    assert (wrong.status, wrong.error["param"]) == (400, "tools[0].custom.format.grammar.syntax")


def test_the_openai_package_reads_custom_calls_and_sends_results_back(engine: FakeEngine) -> None:
    tools: list[Any] = [SHELL]
    messages: list[Any] = [USER]
    with (
        serving(create_app(engine)) as address,
        openai_client(address) as client,
    ):
        answer = client.chat.completions.create(model="base", messages=messages, tools=tools)
        message = answer.choices[0].message
        assert message.tool_calls is not None
        one = message.tool_calls[0]
        assert one.type == "custom"
        assert one.custom.input == 'echo "ü"\n'
        engine.answer = "Done."
        result = {"role": "tool", "tool_call_id": one.id, "content": "ü"}
        again = client.chat.completions.create(
            model="base", messages=[*messages, message.model_dump(), result], tools=tools
        )
    assert again.choices[0].message.content == "Done."
