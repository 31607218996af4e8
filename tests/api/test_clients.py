"""Other people's clients, as their own pages use them, against the whole product: a tiny model with random
weights, of which nothing but the grammar makes sense; and against an engine that answers by script where it
matters what is said. instructor has a file of its own, test_instructor.py.
"""

import asyncio
import gc
import json
from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal

import anyio
import openai
import pytest
from fake_engine import FakeEngine, byte_tokenizer
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool as langchain_tool
from langchain_openai import ChatOpenAI
from live_server import serving
from pydantic import BaseModel, Field, SecretStr
from pydantic_ai import Agent, NativeOutput, RunContext
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from real_server import Running, running
from tiny_models import make_model_folder, write_json
from tool_chat import TAGS, TEMPLATE, call

from personae.api.app import create_app
from personae.api.options import ServeOptions
from personae.engine.sequence import SequenceLog

# These clients leave connections to the garbage collector; called here, no later test hears of them.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)  # or pydantic-ai's `run_sync` makes one that it leaves
    yield
    asyncio.set_event_loop(None)
    loop.close()
    gc.collect()


NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


class Mood(Enum):
    GOOD = "good"
    BAD = "bad"


class Report(BaseModel):
    """What the weather is like."""

    mood: Mood
    degrees: int = Field(ge=-40, le=50)
    wind: Literal["none", "some"] | None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make_model_folder(tmp_path_factory.mktemp("model"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", settings | {"chat_template": TEMPLATE})
    with running(ServeOptions(folder, max_seqs=8, served_model_name="base")) as server:
        yield server


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(tokenizer=byte_tokenizer(TEMPLATE, TAGS), max_model_len=8192)


@pytest.fixture(scope="module")
def scripted(engine: FakeEngine) -> Iterator[str]:
    with serving(create_app(engine)) as address:
        yield f"{address}/v1"


def prompt_of(engine: FakeEngine, log: SequenceLog) -> str:
    return engine.tokenizer.decode(log.tokens, skip_special_tokens=False)


def agent_model(address: str) -> OpenAIChatModel:
    return OpenAIChatModel("base", provider=OpenAIProvider(base_url=address, api_key="none"))


def chat_model(address: str, **extra: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=address, api_key=SecretStr("none"), model="base", **extra)


def test_openai_parses_what_a_model_without_sense_answers(server: Running) -> None:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", _strict_response_validation=True
    ) as client:
        answer = client.chat.completions.parse(
            model="base",
            messages=[{"role": "user", "content": "How is it?"}],
            response_format=Report,
            n=3,
            max_tokens=200,
            extra_body=NO_THINKING,
        )
        assert all(isinstance(choice.message.parsed, Report) for choice in answer.choices)
        offered = [openai.pydantic_function_tool(Report)]
        with client.chat.completions.stream(
            model="base",
            messages=[{"role": "user", "content": "How is it?"}],
            tools=offered,
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=200,
            extra_body=NO_THINKING,
        ) as stream:
            done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
            choice = stream.get_final_completion().choices[0]
        assert choice.message.tool_calls is not None
        assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, Report)
        assert len(done) == 1


@pytest.mark.parametrize("output", [Report, NativeOutput(Report)], ids=["tool", "native"])
def test_pydantic_ai_gets_an_object(server: Running, output: Any) -> None:
    agent = Agent(agent_model(f"{server.url}/v1"), output_type=output)
    settings: Any = {"max_tokens": 200, "extra_body": NO_THINKING, "parallel_tool_calls": False}
    result = agent.run_sync("How is it?", model_settings=settings)
    assert isinstance(result.output, Report)


def test_pydantic_ai_calls_functions_until_it_has_the_answer(scripted: str, engine: FakeEngine) -> None:
    def answer(log: SequenceLog) -> str:
        prompt = prompt_of(engine, log)
        if "sunny, 21 degrees" in prompt:
            return call("final_result", mood="good", degrees=21, wind=None)
        return "<think>Where?</think>" + call("look_outside", city="Cologne")

    engine.answer = answer
    agent = Agent(agent_model(scripted), output_type=Report, deps_type=str, instructions="Be brief.")

    @agent.tool
    def look_outside(context: RunContext[str], city: str) -> str:
        """Looks out of a window.

        Args:
            context: Who asks.
            city: Where the window is.
        """
        return f"{city} is {context.deps}, 21 degrees"

    result = agent.run_sync("How is it?", deps="sunny")
    assert result.output == Report(mood=Mood.GOOD, degrees=21, wind=None)
    thought = [
        part for message in result.all_messages() for part in message.parts if part.part_kind == "thinking"
    ]
    assert thought, "reasoning_content is reasoning to it"


async def stream_of(agent: Agent[None, str]) -> list[str]:
    async with agent.run_stream("Hi") as result:
        return [text async for text in result.stream_text(debounce_by=None)]


def test_pydantic_ai_streams_text(scripted: str, engine: FakeEngine) -> None:
    engine.answer = "Hello, world!"
    texts = anyio.run(stream_of, Agent(agent_model(scripted)))
    assert len(texts) > 1
    assert texts[-1] == "Hello, world!"


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_an_object(server: Running, method: Any) -> None:
    model = chat_model(f"{server.url}/v1", max_completion_tokens=200, extra_body=NO_THINKING)
    found = model.with_structured_output(Report, method=method, strict=True).invoke("How is it?")
    assert isinstance(found, Report)


def test_langchain_calls_a_function_and_sends_its_result_back(scripted: str, engine: FakeEngine) -> None:
    @langchain_tool
    def multiply(a: int, b: int) -> int:
        """Multiplies two numbers."""
        return a * b

    def answer(log: SequenceLog) -> str:
        return "It is 42." if "\n42<|im_end|>" in prompt_of(engine, log) else call("multiply", a=6, b=7)

    engine.answer = answer
    model = chat_model(scripted).bind_tools([multiply])
    messages: list[Any] = [HumanMessage("What is 6 times 7?")]
    said = model.invoke(messages)
    assert [(one["name"], one["args"]) for one in said.tool_calls] == [("multiply", {"a": 6, "b": 7})]
    result = multiply.invoke(said.tool_calls[0])
    assert isinstance(result, ToolMessage)
    assert model.invoke([*messages, said, result]).content == "It is 42."
    pieces = list(model.stream(messages))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert [(one["name"], one["args"]) for one in whole.tool_calls] == [("multiply", {"a": 6, "b": 7})]


def test_langchain_streams_text(scripted: str, engine: FakeEngine) -> None:
    engine.answer = "Hello, world!"
    pieces = [str(piece.content) for piece in chat_model(scripted).stream("Hi")]
    assert len(pieces) > 5
    assert "".join(pieces) == "Hello, world!"


@pytest.mark.parametrize("output", [Report, NativeOutput(Report)], ids=["tool", "native"])
def test_pydantic_ai_gets_an_object_through_responses(server: Running, output: Any) -> None:
    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    agent = Agent(OpenAIResponsesModel("base", provider=provider), output_type=output)
    settings: Any = {"max_tokens": 200, "extra_body": NO_THINKING, "parallel_tool_calls": False}
    result = agent.run_sync("How is it?", model_settings=settings)
    assert isinstance(result.output, Report)


def test_langchain_goes_on_with_the_items_of_a_response(scripted: str, engine: FakeEngine) -> None:
    def answer(log: SequenceLog) -> str:
        done = "\n42<|im_end|>" in prompt_of(engine, log)
        return "It is 42." if done else "<think>Six times.</think>" + call("multiply", a=6, b=7)

    @langchain_tool
    def multiply(a: int, b: int) -> int:
        """Multiplies two numbers."""
        return a * b

    engine.answer = answer
    model = chat_model(scripted, use_responses_api=True).bind_tools([multiply])
    messages: list[Any] = [HumanMessage("What is 6 times 7?")]
    said = model.invoke(messages)
    assert [(one["name"], one["args"]) for one in said.tool_calls] == [("multiply", {"a": 6, "b": 7})]
    assert model.invoke([*messages, said, multiply.invoke(said.tool_calls[0])]).text == "It is 42."
    assert (
        "".join(
            str(piece.text) for piece in model.stream([*messages, said, multiply.invoke(said.tool_calls[0])])
        )
        == "It is 42."
    )
