"""Which specs are small enough to be compiled in the engine's process."""

import json
from typing import Any

import pytest

from personae.evals.hostile import laughs
from personae.grammar.sandbox.small import is_small
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.elements import Concat, Exactly, Json, structure_spec


def spec_of(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "small"),
    [
        ({"type": "string", "maxLength": 200}, True),
        ({"type": "string", "maxLength": 100_000}, False),
        ({"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"}, True),
        ({"type": "string", "pattern": r"^[a-z]+$"}, True),
        ({"type": "string", "pattern": r"(a|aa)*b"}, False),
        ({"type": "string", "pattern": r"(a{10}){10}"}, False),
        ({"type": "string", "pattern": r".*a.*b"}, False),
        ({"type": "string", "pattern": "a{5000}"}, False),
        ({"patternProperties": {"(a|b)*c{900}": {}}}, False),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, True),
        ({"type": "integer", "multipleOf": 5}, True),
        ({"type": "number", "multipleOf": 0.01}, True),
        ({"type": "integer", "multipleOf": 9_999_991}, False),
        ({"allOf": [{"multipleOf": step} for step in (6.75, 19, 2.125)]}, False),
        (laughs(3), True),
        (laughs(40), False),
        ({"enum": [f"value {n}" for n in range(2000)]}, False),
        ({"properties": {f"p{n}": {"type": "string"} for n in range(100)}}, True),
    ],
)
def test_small_is_what_says_little_and_means_little(schema: Any, small: bool) -> None:
    assert is_small(spec_of(schema)) is small


def arrays(least: int, items: Any) -> dict[str, Any]:
    return {"type": "array", "minItems": least, "items": items}


MULTIPLE = {"type": "integer", "multipleOf": 251, "minimum": 1}
REQUIRED = [f"p{n}" for n in range(8)]
OBJECT = {
    "type": "object",
    "properties": {name: {"type": "integer"} for name in REQUIRED},
    "required": REQUIRED,
}


@pytest.mark.parametrize(
    ("schema", "small"),
    [
        (arrays(250, arrays(20, MULTIPLE)), False),
        (arrays(250, OBJECT), False),
        (arrays(256, {"type": "string", "minLength": 120}), False),
        (arrays(160, {"type": "string", "pattern": "^a{120}$"}), False),
        (arrays(160, {"type": "string", "format": "uuid"}), False),
        (arrays(160, {"type": "integer", "minimum": 10**15}), False),
        (arrays(160, {"$ref": "#/own"}) | {"own": {"pattern": "a{120}"}}, False),
        ({"type": "object", "minProperties": 200, "additionalProperties": {"minLength": 200}}, False),
        ({"type": "object", "minProperties": 1}, True),
        (arrays(100, {"type": "integer"}), True),
        (arrays(5, OBJECT), True),
        ({"type": "array", "items": arrays(250, OBJECT)}, True),
    ],
)
def test_sizes_count_as_often_as_the_shortest_answer_has_them(schema: Any, small: bool) -> None:
    assert is_small(spec_of(schema)) is small


def test_those_of_a_structure_add_up() -> None:
    one = Json(arrays(100, {"type": "integer"}), True, "tools[0]")
    assert is_small(structure_spec(Concat((one,))))
    assert not is_small(structure_spec(Concat((one, Exactly(" "), one, one))))


@pytest.mark.parametrize(
    ("spec", "small"),
    [
        (GrammarSpec("json_object"), True),
        (GrammarSpec("regex", "[ab]{8}"), True),
        (GrammarSpec("regex", "((a{100}){100}){100}"), False),
        (GrammarSpec("ebnf", 'root ::= "a"'), False),
        (GrammarSpec("lark", 'start: "a"'), False),
        (GrammarSpec("json_schema", "{"), True),
    ],
)
def test_grammars_are_never_small_and_patterns_by_what_they_repeat(spec: GrammarSpec, small: bool) -> None:
    assert is_small(spec) is small
