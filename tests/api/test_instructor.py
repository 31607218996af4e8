"""instructor against an engine that answers by script."""

import json
from collections.abc import Iterator
from typing import Any

import instructor
import pytest
from fake_engine import FakeEngine, byte_tokenizer
from live_server import serving
from openai import OpenAI
from openai_client import openai_client
from pydantic import BaseModel, field_validator
from tool_chat import TAGS, TEMPLATE, call

from personae.api.app import create_app
from personae.engine.sequence import SequenceLog

MESSAGES = [{"role": "user", "content": "Ada is 36."}]


class Person(BaseModel):
    name: str
    age: int

    @field_validator("name")
    @classmethod
    def upper(cls, name: str) -> str:
        if name != name.upper():
            raise ValueError("write the name in capitals")
        return name


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(tokenizer=byte_tokenizer(TEMPLATE, TAGS), max_model_len=8192)


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[OpenAI]:
    with serving(create_app(engine)) as address, openai_client(address) as client:
        yield client


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
def test_an_object_comes_back_and_a_wrong_one_is_asked_for_again(
    client: OpenAI, engine: FakeEngine, mode: str
) -> None:
    def answer(log: SequenceLog) -> str:
        prompt = engine.tokenizer.decode(log.tokens, skip_special_tokens=False)
        person = {"name": "ADA" if "in capitals" in prompt else "Ada", "age": 36}
        return call("Person", **person) if "TOOLS" in mode else json.dumps(person)

    engine.answer = answer
    asked: Any = instructor.from_openai(client, mode=instructor.Mode[mode])
    person = asked.chat.completions.create(
        model="base", messages=MESSAGES, response_model=Person, max_retries=2
    )
    assert person.model_dump() == {"name": "ADA", "age": 36}
    assert len(engine.submitted) == 2


def test_partial_objects_are_streamed(client: OpenAI, engine: FakeEngine) -> None:
    engine.answer = call("PartialPerson", name="ADA", age=36)
    asked: Any = instructor.from_openai(client)
    found = list(
        asked.chat.completions.create_partial(model="base", messages=MESSAGES, response_model=Person)
    )
    assert (found[-1].name, found[-1].age) == ("ADA", 36)
    assert len(found) > 2
