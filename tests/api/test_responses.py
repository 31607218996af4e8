"""`POST /v1/responses`: the same answers as chat completions, as items and events. The `openai` package's own
types and helpers say whether they are right."""

import copy
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asgi
import msgspec
import openai
import pytest
from fake_engine import FakeEngine, byte_tokenizer
from live_server import serving
from openai import OpenAI
from openai.types.responses import Response
from pydantic import BaseModel
from starlette.applications import Starlette
from tool_chat import TAGS, TEMPLATE, call

from personae.api.app import create_app
from personae.api.choices import Part
from personae.api.decode import decode
from personae.api.responses.answers import ItemDone
from personae.api.responses.form import Form
from personae.api.responses.request import ResponsesRequest
from personae.api.responses.routes import admit
from personae.api.responses.translate import chat_request
from personae.errors import BudgetTooSmall, GrammarError, Overloaded

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"
PAGE = Path(__file__).parents[2] / "docs" / "responses.md"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
SHELL: dict[str, Any] = {"type": "custom", "name": "shell", "description": "Runs a command."}
THOUGHT = "<think>Where?</think>"


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(tokenizer=byte_tokenizer(TEMPLATE, TAGS), max_model_len=4096)


@pytest.fixture(scope="module")
def app(engine: FakeEngine) -> Starlette:
    return create_app(engine)


@pytest.fixture(scope="module")
def address(app: Starlette) -> Iterator[str]:
    with serving(app) as address:
        yield address


@pytest.fixture(autouse=True)
def fresh(engine: FakeEngine) -> None:
    engine.answer, engine.burst = "Hello, world!", 1
    engine.refuse = engine.refuse_late = engine.fail_after = None
    engine.submitted.clear()


@pytest.fixture
def client(address: str) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{address}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def prompt_of(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.submitted[-1].tokens, skip_special_tokens=False)


async def ask(app: Starlette, **fields: Any) -> asgi.Visit:
    return await asgi.Visit(PATH, {"model": "base", "input": "hi", **fields}).run(app)


async def answer(app: Starlette, **fields: Any) -> dict[str, Any]:
    visit = await ask(app, **fields)
    assert visit.status == 200, visit.chunks
    found: dict[str, Any] = json.loads(b"".join(visit.chunks))
    return found


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


@pytest.mark.parametrize("burst", [1, 3, 400])
def test_a_stream_tells_the_same_as_the_whole(client: OpenAI, engine: FakeEngine, burst: int) -> None:
    engine.burst = burst
    engine.answer = THOUGHT + "I look." + call("get_weather", city="Köln") + call("shell", input="ls -l\n")
    asked: Any = {
        "model": "base",
        "input": "Weather?",
        "tools": [WEATHER, SHELL],
        "reasoning": {"effort": "low"},
    }
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == "response.completed"
    assert bare(last.response) == bare(whole)
    assert json.loads(whole.output[2].arguments) == {"city": "Köln"}  # type: ignore[union-attr]  # it is a call
    assert whole.output[3].input == "ls -l\n"  # type: ignore[union-attr]  # of the custom tool
    for place, item in enumerate(whole.output):
        mine = [event for event in events if getattr(event, "output_index", None) == place]
        kinds = [event.type.removeprefix("response.") for event in mine]
        assert (kinds[0], kinds[-1]) == ("output_item.added", "output_item.done")
        deltas = "".join(event.delta for event in mine if event.type.endswith(".delta"))  # type: ignore[union-attr]
        assert deltas in json.loads(json.dumps(list(texts(item))))


ROME, BONN = (call("get_weather", city=city) for city in ("Rome", "Bonn"))


@pytest.mark.parametrize(
    ("said", "kinds"),
    [
        ("I look." + ROME + "And there." + BONN, ["message", "function_call"] * 2),
        (ROME + "I looked.", ["function_call", "message"]),
        (THOUGHT + ROME + BONN + "Both.", ["reasoning", "function_call", "function_call", "message"]),
        (call("shell", input="ls") + "Then." + ROME[:-20], ["custom_tool_call", "message"]),
    ],
    ids=["between", "after", "thought", "broken"],
)
async def test_the_items_do_not_depend_on_how_the_answer_comes(
    app: Starlette, engine: FakeEngine, said: str, kinds: list[str]
) -> None:
    """In the order in which the model wrote them, however its parts were merged on their way."""
    engine.answer = said
    fields = {"model": "base", "input": "Weather?", "tools": [WEATHER, SHELL], "top_logprobs": 1}
    asked = fields | {"include": ["message.output_text.logprobs"]}
    body = decode(json.dumps(asked).encode(), ResponsesRequest, 64)
    job, _ = await admit(app.state.door, body)
    parts: list[Part] = []
    await job.run(parts.append)
    found = []
    for seed in range(40):
        cuts = random.Random(seed)
        left, merged = copy.deepcopy(parts), []
        while left:
            part = left.pop(0)
            while left and cuts.random() < seed / 40:
                part.add(left.pop(0))
            merged.append(part)
        form = Form(job, body)
        events: list[Any] = [event for part in merged for event in form.of(part)]
        items = events[-1].response.output
        done = [event.item for event in events if isinstance(event, ItemDone)]
        assert done == items
        found.append([bare_item(item) for item in items])
    assert [item["type"] for item in found[0]][: len(kinds)] == kinds
    assert all(items == found[0] for items in found)


def bare_item(item: Any) -> Any:
    return {name: value for name, value in msgspec.to_builtins(item).items() if name != "id"}


def texts(item: Any) -> Iterator[str]:
    """What an item says, whichever kind it is."""
    for part in getattr(item, "content", None) or ():
        yield part.text
    for name in ("arguments", "input"):
        if (text := getattr(item, name, None)) is not None:
            yield text


def bare(response: Response) -> Any:
    """Without what differs from answer to answer."""
    left_out = {"id", "call_id", "created_at", "completed_at"}

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: strip(inner) for name, inner in value.items() if name not in left_out}
        return [strip(inner) for inner in value] if isinstance(value, list) else value

    found = strip(response.model_dump())
    found["usage"].pop("input_tokens_details")
    return found


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


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 9999}, "max_output_tokens"),
    ({"temperature": 9}, "temperature"),
    ({"top_logprobs": 99}, "top_logprobs"),
    ({"include": ["file_search_call.results"]}, "include[0]"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": False}}}, "text.format.schema"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "a b", "parameters": {}}]}, "tools[0].name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
    (
        {
            "tools": [WEATHER],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "x"}],
            },
        },
        "tool_choice.tools[0].name",
    ),
    ({"input": []}, "input"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"content": "hi"}]}, "input[0].type"),
    ({"input": [{"role": "nobody", "content": "hi"}]}, "input[0].role"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    (
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
        "input[0].encrypted_content",
    ),
    (
        {
            "input": [
                "hi" and {"role": "user", "content": "hi"},
                {"role": "user", "content": [{"type": "input_image"}]},
            ]
        },
        "input[1].content[0].type",
    ),
    (
        {
            "input": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "Hm."},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"},
            ]
        },
        "input[2].arguments",
    ),
]


@pytest.mark.parametrize(
    ("fields", "param"), WRONG, ids=lambda value: value if isinstance(value, str) else ""
)
async def test_what_is_wrong_is_named_as_the_client_knows_it(
    app: Starlette, fields: dict[str, Any], param: str
) -> None:
    visit = await ask(app, **fields)
    assert visit.status == 400, visit.chunks
    assert visit.error["param"] == param
    for chats in ("messages", "response_format", "max_completion_tokens", ".function"):
        assert chats not in visit.error["message"]


async def test_refusals_of_the_engine_name_the_field_too(app: Starlette, engine: FakeEngine) -> None:
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "string"}}
    engine.refuse = BudgetTooSmall("The shortest answer has 9 tokens.")
    small = await ask(app, max_output_tokens=3, text={"format": schema})
    assert (small.status, small.error["param"]) == (400, "max_output_tokens")
    engine.refuse = GrammarError("No.")
    bound = await ask(app, text={"format": schema})
    assert (bound.status, bound.error["param"]) == (400, "text.format.schema")


def test_a_full_engine_is_a_503_and_one_that_breaks_off_a_failed_response(
    client: OpenAI, engine: FakeEngine
) -> None:
    engine.refuse = Overloaded("full")
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="base", input="hi", stream=True)
    engine.refuse, engine.fail_after = None, 4
    *_, delta, last = client.responses.create(model="base", input="hi", stream=True)
    assert delta.type == "response.output_text.delta"
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert "could not be finished" in last.response.error.message
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="base", input="hi")


async def test_every_event_has_its_name(app: Starlette) -> None:
    visit = await ask(app, stream=True)
    for event in b"".join(visit.chunks).decode().strip().split("\n\n"):
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_chats_own_fields_are_handed_on() -> None:
    body = {"model": "base", "input": "hi", "seed": 3, "top_k": 5, "logit_bias": {"5": 1.0}, "priority": 2}
    body |= {
        "adapters": [{"name": "poet", "weight": 0.5}],
        "structured_outputs": {"regex": "a+"},
        "stop": "x",
    }
    chat, _ = chat_request(decode(json.dumps(body).encode(), ResponsesRequest, 64))
    for name in ("seed", "top_k", "logit_bias", "priority", "adapters", "structured_outputs", "stop"):
        assert getattr(chat, name) is not None
    assert chat.logit_bias == {5: 1.0}


def test_the_examples_of_the_page_run(client: OpenAI, engine: FakeEngine) -> None:
    def reply(log: Any) -> str:
        prompt = engine.tokenizer.decode(log.tokens, skip_special_tokens=False)
        if "12 °C" in prompt:
            return "Rain."
        return call("get_weather", city="Cologne") if "get_weather" in prompt else '{"city": "Cologne"}'

    engine.answer = reply
    names: dict[str, Any] = {"client": client, "model": "base", "json": json}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, names)
