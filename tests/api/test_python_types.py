"""Python types as `response_format` of the in-process API."""

import enum
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict

import jsonschema
import msgspec
import outlines.types
import pytest
from outlines.types.dsl import either, exactly
from pydantic import BaseModel, Field
from tiny_models import model_folder

import personae
from personae.api.python_types import with_types
from personae.errors import RequestError

pytestmark = pytest.mark.anyio


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Spot(BaseModel):
    x: int = Field(ge=0, le=9)
    color: Color


@dataclass
class Road:
    length: Literal[1, 2]
    open: bool


class Map(TypedDict):
    title: Literal["a", "b"]


class Pair(NamedTuple):
    a: bool
    b: bool


class Car(msgspec.Struct):
    doors: Literal[2, 4]


@pytest.fixture
async def engine() -> AsyncIterator["personae.Engine"]:
    async with personae.open(
        model_folder("qwen3"), device="cpu", dtype="float32", served_model_name="tiny"
    ) as engine:
        yield engine


async def test_every_type_binds_the_answer(engine: "personae.Engine") -> None:
    async def text(wanted: Any) -> str:
        answer = await engine.complete("x", response_format=wanted, max_tokens=120, seed=1)
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].text

    assert isinstance(Spot.model_validate_json(await text(Spot)), Spot)
    assert msgspec.json.decode(await text(Road), type=Road)
    assert msgspec.json.decode(await text(Map), type=Map)["title"] in ("a", "b")
    assert len(msgspec.json.decode(await text(Pair), type=Pair)) == 2
    assert msgspec.json.decode(await text(Car), type=Car).doors in (2, 4)
    assert await text(Color) in ("red", "blue")
    assert await text(Literal["yes", "no"]) in ("yes", "no")
    assert json.loads(await text(Literal[3, 4])) in (3, 4)
    assert json.loads(await text(bool)) in (True, False)
    assert await text(outlines.types.Choice(["yes", "no"])) in ("yes", "no")
    assert len(await text(outlines.types.Regex("[ab]{3}"))) == 3
    assert await text(outlines.types.CFG('start: "x" "y"')) == "xy"
    assert await text(exactly(2, either("a", "b"))) in ("aa", "ab", "ba", "bb")
    assert Spot.model_validate_json(await text(outlines.types.JsonSchema(Spot)))


async def test_a_conversation_takes_them_too(engine: "personae.Engine") -> None:
    messages = [{"role": "user", "content": "Where?"}]
    answer = await engine.chat(messages, response_format=Spot, max_tokens=120, seed=2)
    assert Spot.model_validate_json(answer.choices[0].message.content or "")
    text = ""
    async with engine.stream_chat(messages, response_format=Spot, max_tokens=120, seed=2) as chunks:
        async for chunk in chunks:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == answer.choices[0].message.content


@pytest.mark.parametrize("wanted", [Spot, Road, Map, Car, list[Spot], dict[str, int], int | None], ids=str)
def test_objects_have_their_fields_and_no_others(wanted: Any) -> None:
    fields = with_types({"response_format": wanted, "max_tokens": 3})
    assert (fields["max_tokens"], fields["response_format"]) == (3, None)
    schema = fields["structured_outputs"]["json"]
    jsonschema.Draft202012Validator.check_schema(schema)
    good = {
        Spot: {"x": 3, "color": "red"},
        Road: {"length": 1, "open": True},
        Map: {"title": "a"},
        Car: {"doors": 2},
    }.get(wanted)
    if good is not None:
        jsonschema.validate(good, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**good, "more": 1}, schema)


def test_constraints_of_pydantic_fields_are_kept() -> None:
    schema = with_types({"response_format": Spot})["structured_outputs"]["json"]
    assert schema["properties"]["x"]["maximum"] == 9


def test_what_a_client_would_send_is_left_alone() -> None:
    for fields in ({}, {"response_format": None}, {"response_format": {"type": "json_object"}}):
        assert with_types(fields) == fields


def test_a_type_without_a_schema_is_refused() -> None:
    with pytest.raises(RequestError) as refused:
        with_types({"response_format": object()})
    assert refused.value.param == "response_format"
    with pytest.raises(RequestError):
        with_types({"response_format": int, "structured_outputs": {"regex": "a"}})
