"""`POST /v1/responses`: the same answers as chat completions, as items. The `openai` package's own types and
helpers say whether they are right."""

import json
import re
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from live_server import serving
from openai import OpenAI
from openai_client import openai_client
from pydantic import BaseModel
from responses_asked import SHELL, THOUGHT, WEATHER, answer, prompt_of
from starlette.applications import Starlette
from tool_chat import call
from uploads import open_fixture

from personae.api.app import create_app
from personae.api.responses.background import BackgroundResponses
from personae.api.responses.request import ResponsesRequest
from personae.api.responses.store import ResponseStore
from personae.api.responses.translate import chat_request
from personae.api.wire.decode import decode
from personae.grammar.spec import GrammarSpec

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "responses.md"


def test_text_is_a_message_and_the_request_is_repeated(client: OpenAI, engine: FakeEngine) -> None:
    response = client.responses.create(
        model="base",
        instructions="Be brief.",
        input="hi",
        max_output_tokens=100,
        temperature=0.5,
        metadata={"a": "b"},
        store=False,
    )
    assert response.output_text == "Hello, world!"
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert (response.instructions, response.max_output_tokens) == ("Be brief.", 100)
    assert (response.temperature, response.metadata, response.model) == (0.5, {"a": "b"}, "base")
    assert response.usage is not None
    assert response.usage.output_tokens == 14
    assert response.usage.total_tokens == response.usage.input_tokens + 14
    assert prompt_of(engine).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi")
    assert engine.submitted[-1].params.max_tokens == 100


def test_a_conversation_goes_to_the_template_as_chat_has_it(client: OpenAI, engine: FakeEngine) -> None:
    client.responses.create(
        model="base",
        input=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Hm."}],
            },
            {
                "type": "function_call",
                "call_id": "c1",
                "name": "get_weather",
                "arguments": '{"city": "Rome"}',
            },
            {
                "type": "function_call",
                "call_id": "c2",
                "name": "get_weather",
                "arguments": '{"city": "Bonn"}',
            },
            {"type": "function_call_output", "call_id": "c1", "output": "sun"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "rain"}],
            },
            {"role": "assistant", "content": "Sun and rain."},
            {"role": "user", "content": "Thanks"},
        ],
    )
    prompt = prompt_of(engine)
    calls = call("get_weather", city="Rome") + call("get_weather", city="Bonn")
    assert f"<think>Hm.</think>{calls}<|im_end|>" in prompt
    assert re.findall(r"<\|im_start\|>(\w+)", prompt) == [
        *("system", "user", "assistant", "tool", "tool", "assistant", "user", "assistant")
    ]


def test_reasoning_text_and_calls_are_items_of_their_own(client: OpenAI, engine: FakeEngine) -> None:
    calls = call("get_weather", city="Rome") + call("get_weather", city="Bonn")
    engine.answer = "Where?</think>I look." + calls
    tools: Any = [WEATHER]
    response = client.responses.create(
        model="base", input="Weather?", tools=tools, reasoning={"effort": "low"}
    )
    assert [item.type for item in response.output] == ["reasoning", "message", *["function_call"] * 2]
    thought, said, first, second = response.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert thought.content[0].text == "Where?"
    assert response.output_text == "I look."
    assert said.type == "message"
    assert first.type == second.type == "function_call"
    assert json.loads(first.arguments) == {"city": "Rome"}
    assert first.call_id != second.call_id
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == len("Where?") + 1


def test_items_of_an_answer_can_be_sent_back(client: OpenAI, engine: FakeEngine) -> None:
    engine.answer = THOUGHT + call("get_weather", city="Rome") + call("shell", input="ls")
    tools: Any = [WEATHER, SHELL]
    asked: list[Any] = [{"role": "user", "content": "Weather?"}]
    response = client.responses.create(model="base", input=asked, tools=tools, reasoning={"effort": "low"})
    calls = [item for item in response.output if item.type in ("function_call", "custom_tool_call")]
    results = [
        {"type": f"{item.type}_output", "call_id": item.call_id, "output": "sun"}  # type: ignore[union-attr]
        for item in calls
    ]
    engine.answer = "Sun."
    again = client.responses.create(model="base", input=[*asked, *response.output, *results], tools=tools)
    assert again.output_text == "Sun."
    assert "<think>Where?</think>" + call("get_weather", city="Rome") in prompt_of(engine)
    dumped = [item.model_dump(mode="json", exclude_none=True) for item in response.output]
    client.responses.create(model="base", input=[*asked, *dumped, *results], tools=tools)


def test_parse_and_the_stream_helper_give_objects(client: OpenAI, engine: FakeEngine) -> None:
    class Person(BaseModel):
        name: str
        age: int

    engine.answer = '{"name": "Ada", "age": 36}'
    parsed = client.responses.parse(model="base", input="Who?", text_format=Person)
    assert parsed.output_parsed == Person(name="Ada", age=36)
    grammar = engine.submitted[-1].grammar
    assert grammar is not None
    assert "integer" in grammar.source
    with client.responses.stream(model="base", input="Who?", text_format=Person) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == Person(name="Ada", age=36)


@pytest.mark.parametrize("stream", [False, True])
def test_spent_tokens_make_a_response_incomplete(client: OpenAI, stream: bool) -> None:
    given: Any = client.responses.create(model="base", input="hi", max_output_tokens=5, stream=stream)
    if stream:
        *_, last = given
        assert last.type == "response.incomplete"
        given = last.response
    assert (given.status, given.output_text) == ("incomplete", "Hello")
    assert given.incomplete_details.reason == "max_output_tokens"
    assert given.output[0].status == "incomplete"


def test_an_empty_answer_is_an_empty_message(client: OpenAI, engine: FakeEngine) -> None:
    engine.answer = ""
    response = client.responses.create(model="base", input="hi")
    [item] = response.output
    assert item.type == "message"
    assert response.output_text == ""


def test_logprobs_are_those_of_the_text(client: OpenAI, engine: FakeEngine) -> None:
    engine.answer = THOUGHT + "I look." + call("get_weather", city="Rome")
    tools: Any = [WEATHER]
    asked: Any = {"model": "base", "input": "hi", "tools": tools, "include": ["message.output_text.logprobs"]}
    _, said, _ = client.responses.create(**asked, top_logprobs=2).output
    assert said.type == "message"
    part = said.content[0]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [entry.token for entry in part.logprobs] == list("I look.")
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    streamed = [
        entry.token
        for event in client.responses.create(**asked, stream=True)
        if event.type == "response.output_text.delta"
        for entry in event.logprobs
    ]
    assert streamed == list("I look.")


async def test_an_answer_that_is_not_strict_is_checked(app: Starlette, engine: FakeEngine) -> None:
    engine.answer = "[1]"
    schema = {"type": "object"}
    format = {"type": "json_schema", "name": "x", "schema": schema, "strict": False}
    response = await answer(app, text={"format": format})
    assert response["personae"]["validation"]["valid"] is False
    assert "personae" not in await answer(app)


async def test_a_backend_is_asked_for_by_name(app: Starlette, engine: FakeEngine) -> None:
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    await answer(app, structured_outputs={"regex": "a+"}, guided_decoding_backend="outlines", **quiet)
    assert engine.submitted[-1].grammar == GrammarSpec("regex", "a+", backend="outlines")


def test_chats_own_fields_are_handed_on() -> None:
    body = {"model": "base", "input": "hi", "seed": 3, "top_k": 5, "logit_bias": {"5": 1.0}, "priority": 2}
    body |= {
        "adapters": [{"name": "poet", "weight": 0.5}],
        "structured_outputs": {"regex": "a+"},
        "stop": "x",
    }
    chat, _ = chat_request(decode(json.dumps(body).encode(), ResponsesRequest, 64), 10)
    for name in ("seed", "top_k", "logit_bias", "priority", "adapters", "structured_outputs", "stop"):
        assert getattr(chat, name) is not None
    assert chat.logit_bias == {5: 1.0}


def test_the_examples_of_the_page_run(engine: FakeEngine, tmp_path: Path) -> None:
    def reply(log: Any) -> str:
        prompt = engine.tokenizer.decode(log.tokens, skip_special_tokens=False)
        if "12 °C" in prompt:
            return "Rain."
        return call("get_weather", city="Cologne") if "get_weather" in prompt else '{"city": "Cologne"}'

    engine.answer = reply
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 7
    with open_fixture(tmp_path) as fixture:
        store = ResponseStore(fixture.data)
        app = create_app(engine, stored=store)
        running = BackgroundResponses(store).runs(app)
        run_blocks(blocks, app, running)


def run_blocks(blocks: list[str], app: Starlette, running: AbstractAsyncContextManager[None]) -> None:
    with (
        serving(app, None, running) as address,
        openai_client(address) as client,
    ):
        names: dict[str, Any] = {"client": client, "model": "base", "json": json, "time": time}
        for block in blocks:
            exec(block, names)
