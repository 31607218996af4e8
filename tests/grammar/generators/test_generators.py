"""Schemas as pydantic, zod 3 and 4, and TypeBox generate them are enforced as they are."""

import json
from datetime import date
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, WithJsonSchema, conset
from worst import WORST, answer, text_of, text_vocabulary

from personae.grammar.compiler import GrammarCompiler
from personae.grammar.schema.document import validator
from personae.grammar.spec import GrammarSpec

VOCABULARY = text_vocabulary()
COMPILER = GrammarCompiler(VOCABULARY, sandboxed=False)
# As pydantic writes EmailStr, which needs another package.
Email = Annotated[str, WithJsonSchema({"type": "string", "format": "email"})]


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    tricks: set[str] = set()


class Owner(BaseModel):
    email: Email
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    code: Annotated[str, Field(pattern=r"^[A-Z]{2}\d{3}$")]


class Point(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    x: int
    y: float


class Sets(BaseModel):
    numbers: set[int]
    colours: set[Colour]
    points: frozenset[Point]
    short: set[Annotated[str, Field(max_length=4)]]
    several: conset(int, min_length=2, max_length=4)  # type: ignore[valid-type]
    days: set[date]
    either: set[int | str]


class Tree(BaseModel):
    name: str
    children: list["Tree"] = []


class Various(BaseModel):
    level: Literal["low", 3, None]
    id: UUID
    day: date
    pair: tuple[int, str]
    amounts: dict[str, float]
    maybe: Owner | None = None


PYDANTIC: dict[str, Any] = {
    "discriminated union": Owner.model_json_schema(),
    "sets": Sets.model_json_schema(),
    "recursive": Tree.model_json_schema(),
    "various": Various.model_json_schema(),
    "literals": TypeAdapter(Literal["a", "b"] | Literal[1] | None).json_schema(),
    "list of a union": TypeAdapter(list[Cat | Dog]).json_schema(),
    "set of tuples": TypeAdapter(set[tuple[int, bool]]).json_schema(),
}
GENERATED = json.loads((Path(__file__).parent / "generated.json").read_text())
SCHEMAS = {
    f"{tool}: {name}": schema
    for tool, schemas in ({"pydantic": PYDANTIC} | GENERATED).items()
    for name, schema in schemas.items()
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_enforced_and_answers_are_valid_whatever_the_model_prefers(name: str) -> None:
    schema = SCHEMAS[name]
    grammar = COMPILER.compile(GrammarSpec("json_schema", json.dumps(schema), compact=True))
    judge = validator(schema)
    for spare, taste in enumerate(WORST):
        budget = grammar.shortest + 12 * spare
        tokens = answer(grammar.matcher(budget), VOCABULARY, WORST[taste], budget, spare)
        judge.validate(json.loads(text_of(tokens, VOCABULARY)))


@pytest.mark.parametrize(
    ("name", "field", "repeated"),
    [
        ("pydantic: sets", "numbers", [1, 1]),
        ("pydantic: sets", "points", [{"x": 1, "y": 0.5}, {"x": 1, "y": 0.5}]),
        ("pydantic: sets", "days", ["2024-02-29", "2024-02-29"]),
        ("zod 3: set", "numbers", [7, 7]),
        ("TypeBox: set", "ids", [1, 2, 1]),
    ],
)
def test_a_set_has_no_item_twice(name: str, field: str, repeated: list[Any]) -> None:
    schema = {"$defs": SCHEMAS[name].get("$defs", {}), **SCHEMAS[name]["properties"][field]}
    grammar = COMPILER.compile(GrammarSpec("json_schema", json.dumps(schema), compact=True))
    for items, valid in (
        (repeated, False),
        (repeated[:2] if repeated[0] != repeated[1] else repeated[:1], True),
    ):
        text = json.dumps(items, separators=(",", ":")).encode()
        matcher = grammar.matcher()
        taken = matcher.feed(text)
        if valid:
            assert taken == len(text)
        else:
            assert taken < len(text)
