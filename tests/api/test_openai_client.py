"""The `openai` package against the real server, with its strict validation of answers."""

from collections.abc import Iterator

import openai
import pytest
from fake_engine import FakeEngine
from live_server import serving
from openai import OpenAI
from openai_client import openai_client
from pydantic import BaseModel

from personae.api.app import create_app
from personae.errors import Overloaded

HI: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def address(engine: FakeEngine) -> Iterator[str]:
    with serving(create_app(engine)) as address:
        yield address


@pytest.fixture
def client(address: str, engine: FakeEngine) -> Iterator[OpenAI]:
    with openai_client(address) as client:
        yield client
    engine.answer, engine.refuse, engine.fail_after = "Hello, world!", None, None


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="base", messages=HI, n=2, logprobs=True, top_logprobs=3, seed=1, max_completion_tokens=100
    )
    assert [choice.message.content for choice in answer.choices] == ["Hello, world!"] * 2
    assert answer.choices[0].finish_reason == "stop"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content[0].top_logprobs) == 3
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer._request_id


def test_chat_streams(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="base", messages=HI, stream=True, stream_options={"include_usage": True}, logprobs=True
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Hello, world!"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 14


def test_the_stream_helper_puts_the_answer_together(client: OpenAI) -> None:
    with client.chat.completions.stream(model="base", messages=HI) as stream:
        for _ in stream:
            pass
        completion = stream.get_final_completion()
    assert completion.choices[0].message.content == "Hello, world!"


def test_parse_gives_the_object(client: OpenAI, engine: FakeEngine) -> None:
    class Person(BaseModel):
        name: str
        age: int

    engine.answer = '{"name": "Ada", "age": 36}'
    parsed = client.chat.completions.parse(model="base", messages=HI, response_format=Person)
    assert parsed.choices[0].message.parsed == Person(name="Ada", age=36)
    grammar = engine.submitted[-1].grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"


def test_an_answer_can_be_sent_back(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="base", messages=HI)
    history = [*HI, answer.choices[0].message.model_dump(), *HI]
    again = client.chat.completions.create(model="base", messages=history)  # type: ignore[arg-type]  # as users do it
    assert again.choices[0].message.content == "Hello, world!"


def test_completions(client: OpenAI) -> None:
    answer = client.completions.create(model="team/pirate", prompt=["a", "b"], echo=True, max_tokens=3)
    assert [choice.text for choice in answer.choices] == ["aHel", "bHel"]
    scored = client.completions.create(model="base", prompt="a", logprobs=2, max_tokens=3).choices[0].logprobs
    assert scored is not None
    assert scored.tokens == ["H", "e", "l"]


def test_completions_with_the_nulls_that_the_packages_types_lack(address: str) -> None:
    # Until its end a streamed completion has no reason to end, and an echoed prompt's first token has no
    # logprob: both are null, here as at OpenAI, and strict validation knows neither.
    with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model="base", prompt=[1, 2], stream=True, stop="wor")
        assert "".join(chunk.choices[0].text for chunk in stream) == "Hello, "
        echoed = client.completions.create(model="base", prompt="ab", echo=True, logprobs=1, max_tokens=1)
    logprobs = echoed.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "H"]
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["base", "team/pirate"]
    assert client.models.retrieve("team/pirate").owned_by == "personae"


def test_errors_have_their_types(client: OpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="base", messages=HI, n=99)
    assert (wrong.value.param, wrong.value.code) == ("n", "out_of_range")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=HI)
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(model="base", input="x")
    engine.refuse = Overloaded("full")
    with pytest.raises(openai.InternalServerError) as full:
        client.chat.completions.create(model="base", messages=HI, stream=True)
    assert full.value.status_code == 503
    assert full.value.response.headers["retry-after"] == "1"


def test_an_error_within_a_stream_is_raised(client: OpenAI, engine: FakeEngine) -> None:
    engine.fail_after = 4
    got = ""
    chunks = client.chat.completions.create(model="base", messages=HI, stream=True)

    def read() -> None:
        nonlocal got
        for chunk in chunks:
            got += chunk.choices[0].delta.content or ""

    with pytest.raises(openai.APIError, match="could not be finished"):
        read()
    assert got == "Hell"
