"""Tools through the whole product: a tiny model with random weights, which writes nothing but noise unless
the grammar holds it; and the `openai` package's helpers."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeEngine, byte_tokenizer
from live_server import serving
from openai import OpenAI
from openai_client import openai_client
from patience import PATIENCE
from pydantic import BaseModel
from real_server import Running, running
from tiny_models import make_model_folder, write_json
from tool_chat import TAGS, TEMPLATE, TIME, WEATHER, call, tool, write_tags

from personae.api.app import create_app
from personae.api.options import ServeOptions

HI: list[Any] = [{"role": "user", "content": "hi"}]
COUNT = tool("count", strict=True, to={"type": "integer", "minimum": 3, "maximum": 5})

NUMBER = {
    "type": "json_schema",
    "json_schema": {"name": "number", "schema": COUNT["function"]["parameters"], "strict": True},
}


@pytest.fixture(scope="module", params=["text", "tokens"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make_model_folder(tmp_path_factory.mktemp("model"))
    if request.param == "tokens":
        write_tags(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", settings | {"chat_template": TEMPLATE})
    with running(ServeOptions(folder, max_seqs=8, served_model_name="base")) as server:
        yield server


def ask(server: Running, **extra: Any) -> httpx.Response:
    body = {"model": "base", "messages": HI, "max_tokens": 200, "temperature": 0.8, **extra}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE)


def choices(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["choices"]
    return found


def test_a_required_call_is_made_by_a_model_that_knows_of_none(server: Running) -> None:
    extra = {"tools": [COUNT], "tool_choice": "required", "parallel_tool_calls": False, "seed": 1}
    for choice in choices(ask(server, **extra, n=4, chat_template_kwargs={"enable_thinking": False})):
        [one] = choice["message"]["tool_calls"]
        assert one["function"]["name"] == "count"
        assert json.loads(one["function"]["arguments"])["to"] in (3, 4, 5)
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None


def test_reasoning_that_the_prompt_opened_comes_before_a_required_call(server: Running) -> None:
    extra = {"tools": [COUNT], "tool_choice": "required", "parallel_tool_calls": False}
    response = ask(
        server, **extra, n=4, max_tokens=90, seed=2, chat_template_kwargs={"enable_thinking": True}
    )
    for choice in choices(response):
        assert choice["message"]["reasoning_content"], "it thinks on until it is made to stop"
        [one] = choice["message"]["tool_calls"]
        assert json.loads(one["function"]["arguments"])["to"] in (3, 4, 5)


@pytest.mark.parametrize("budget", [0, 6])
@pytest.mark.parametrize("bound", ["schema", "call", "nothing"])
def test_reasoning_ends_at_its_budget_streamed_and_not(server: Running, bound: str, budget: int) -> None:
    extra: dict[str, Any] = {
        "schema": {"response_format": NUMBER},
        "call": {"tools": [COUNT], "tool_choice": "required", "parallel_tool_calls": False},
        "nothing": {},
    }[bound]
    extra |= {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": budget, "seed": 5}
    for choice in choices(ask(server, **extra, n=3, return_token_ids=True, max_tokens=60)):
        close = tokenized(server, "</think>", add_special_tokens=False)
        ending = close["tokens"] if close["count"] == 1 else []
        said = choice["message"].get("reasoning_content", "")
        if ending:
            assert choice["token_ids"].index(ending[0]) <= budget + 3
        assert bool(said.strip()) <= bool(budget)
        assert len(said) <= 16 * (budget + 3)
        if bound == "schema":
            assert 3 <= json.loads(choice["message"]["content"])["to"] <= 5
        elif bound == "call":
            [one] = choice["message"]["tool_calls"]
            assert json.loads(one["function"]["arguments"])["to"] in (3, 4, 5)
        else:
            assert choice["message"]["content"], "it goes on to answer"
    whole = choices(ask(server, **extra, max_tokens=60))[0]["message"]
    streamed = ""
    body = {"model": "base", "messages": HI, "max_tokens": 60, "temperature": 0.8, "stream": True, **extra}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for part in json.loads(line.removeprefix("data: "))["choices"]:
                    streamed += part["delta"].get("reasoning_content") or ""
    assert streamed == whole.get("reasoning_content", "")


def test_what_auto_writes_is_whole_whatever_it_is(server: Running) -> None:
    bias = {}
    if (tag := one_token(server, "<tool_call>")) is not None:
        bias = {str(tag): 6.0}
    made = 0
    for choice in choices(ask(server, tools=[COUNT], n=8, max_tokens=120, seed=3, logit_bias=bias)):
        calls = choice["message"].get("tool_calls", [])
        made += len(calls)
        if choice["finish_reason"] != "length":
            assert all(json.loads(one["function"]["arguments"])["to"] in (3, 4, 5) for one in calls)
            assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    assert made or not bias, "with a liking for the tag there are calls"


def tokenized(server: Running, text: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": text, **fields}
    found: dict[str, Any] = httpx.post(f"{server.url}/tokenize", json=body, timeout=PATIENCE).json()
    return found


def one_token(server: Running, text: str) -> int | None:
    tokens = tokenized(server, text)["tokens"]
    return int(tokens[0]) if len(tokens) == 1 else None


def test_a_tool_that_cannot_be_enforced_is_refused_and_harms_nobody(server: Running) -> None:
    odd = tool("odd", strict=True, a={"type": "array", "items": {"$ref": "#/nowhere"}})
    with ThreadPoolExecutor(3) as pool:
        good = [pool.submit(ask, server, tools=[COUNT], tool_choice="required", seed=i) for i in range(2)]
        wrong = ask(server, tools=[COUNT, odd])
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == "tools[1].function.parameters"
        assert "/nowhere" in wrong.json()["error"]["message"]
        assert all(answer.result().status_code == 200 for answer in good)


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(tokenizer=byte_tokenizer(TEMPLATE, TAGS), max_model_len=4096)


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[OpenAI]:
    with serving(create_app(engine)) as address, openai_client(address) as client:
        yield client


def test_the_openai_package_reads_calls_and_sends_their_results_back(
    client: OpenAI, engine: FakeEngine
) -> None:
    engine.answer = call("get_weather", city="Köln") + call("get_time")
    tools: list[Any] = [WEATHER, TIME]
    answer = client.chat.completions.create(model="base", messages=HI, tools=tools, n=2)
    message = answer.choices[1].message
    assert answer.choices[1].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    results = [{"role": "tool", "tool_call_id": one.id, "content": "fine"} for one in message.tool_calls]
    engine.answer = "It is fine."
    history = [*HI, message.model_dump(), *results]
    again = client.chat.completions.create(model="base", messages=history, tools=tools)
    assert again.choices[0].message.content == "It is fine."
    prompt = engine.tokenizer.decode(engine.submitted[-1].tokens, skip_special_tokens=False)
    assert '{"name": "get_weather", "arguments": {"city": "Köln"}}' in prompt


def test_the_openai_packages_stream_helper_puts_calls_together(client: OpenAI, engine: FakeEngine) -> None:
    engine.answer = "<think>Which?</think>\nSo:\n" + call("get_weather", city="Köln") + call("get_time")
    tools: list[Any] = [
        tool("get_weather", strict=True, city={"type": "string"}),
        tool("get_time", strict=True),
    ]
    with client.chat.completions.stream(model="base", messages=HI, tools=tools) as stream:
        events = [event.type for event in stream]
        choice = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in events
    assert events.count("tool_calls.function.arguments.done") == 2
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "So:"
    assert choice.message.tool_calls is not None
    parsed = [(one.function.name, one.function.parsed_arguments) for one in choice.message.tool_calls]
    assert parsed == [("get_weather", {"city": "Köln"}), ("get_time", {})]


def test_the_openai_packages_parse_gives_arguments_as_objects(client: OpenAI, engine: FakeEngine) -> None:
    class GetWeather(BaseModel):
        city: str

    engine.answer = call("GetWeather", city="Köln")
    offered = [openai.pydantic_function_tool(GetWeather)]
    message = client.chat.completions.parse(model="base", messages=HI, tools=offered).choices[0].message
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.parsed_arguments == GetWeather(city="Köln")
    engine.answer = call("GetWeather", city="Köln")[:-20]
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="base", messages=HI, tools=offered, max_tokens=30)


def test_the_openai_package_sees_reasoning_beside_a_parsed_answer(client: OpenAI, engine: FakeEngine) -> None:
    class Person(BaseModel):
        name: str

    engine.answer = '<think>{"name": "Bob"}?</think>\n\n{"name": "Ada"}'
    answer = client.chat.completions.parse(model="base", messages=HI, response_format=Person)
    message = answer.choices[0].message
    assert message.parsed == Person(name="Ada")
    assert message.model_extra is not None
    assert message.model_extra["reasoning_content"] == '{"name": "Bob"}?'
