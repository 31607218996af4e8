"""In any order, objects that say what they require in several places, or under overlapping names, are bound
as the validator says."""

import json
from functools import cache
from itertools import combinations, permutations
from typing import Any

import jsonschema_rs
import pytest

from personae.evals.suites.maskbench import byte_vocabulary
from personae.grammar.backend import BoundGrammar
from personae.grammar.backends.llguidance_text import keeps_order
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.elements import Concat, Exactly, Json, structure_spec

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
ABC: dict[str, Any] = {"type": "object", "properties": {"a": STRING, "b": INTEGER, "c": STRING}}
CLOSED = {"additionalProperties": False}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "one of several is required": ABC | CLOSED | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "one of several is required, open": ABC | {"anyOf": [{"required": ["a", "zz"]}, {"required": ["b"]}]},
    "exactly one is required": ABC | CLOSED | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "all of several": ABC | {"allOf": [{"required": ["a"]}, {"properties": {"b": {"minimum": 1}}}]},
    "a reference with more beside it": {
        "$ref": "#/$defs/abc",
        "required": ["c"],
        "$defs": {"abc": ABC | {"required": ["a"]}},
    },
    "a condition": ABC | CLOSED | {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "alternatives of values": ABC
    | {
        "anyOf": [
            {"properties": {"a": {"const": "x"}}, "required": ["a"]},
            {"properties": {"b": {"const": 2}}},
        ]
    },
    "a listed name matches a pattern": ABC | CLOSED | {"patternProperties": {"^[a-z]$": {"minLength": 1}}},
    "a required name matches a pattern": {
        "type": "object",
        "required": ["b", "zz"],
        "patternProperties": {"^[a-z]+$": INTEGER},
        **CLOSED,
    },
    "all names of a pattern are listed": ABC | CLOSED | {"patternProperties": {"^[ab]$": {}}},
    "patterns apart": {
        "type": "object",
        "properties": {"b": INTEGER},
        "patternProperties": {"^[ac]$": STRING, "^z": INTEGER},
        "additionalProperties": {"type": "null"},
    },
    "patterns that overlap": {
        "type": "object",
        "properties": {"b": INTEGER},
        "patternProperties": {"^[a-y]$": {"type": ["string", "integer"]}, "^[ac]": STRING, "z$": INTEGER},
        **CLOSED,
    },
    "a pattern that matches every name": ABC
    | {"patternProperties": {"[a-z]*": {"type": ["string", "integer"]}}},
    "listed objects": {"enum": [{"a": "x", "b": 1}, {"c": "", "b": 1, "a": "x"}, 7]},
    "a listed object beside a type": {"type": "object", "enum": [{"zz": 2, "a": "x"}, [1], {}]},
    "no type, and keywords of several types": {
        "properties": {"a": STRING, "b": INTEGER},
        "required": ["a"],
        "minimum": 3,
        "pattern": "x",
    },
    "within items of an older draft": {
        **DRAFT_7,
        "type": "object",
        "properties": {"a": STRING, "b": INTEGER},
        "additionalProperties": {"type": "array", "items": [ABC], "additionalItems": False},
    },
}
MEMBERS = {"a": "x", "b": 1, "c": "", "zz": 2}


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_vocabulary(), sandboxed=False)


def compiled(schema: Any) -> BoundGrammar:
    return compiler().compile_here(GrammarSpec("json_schema", json.dumps(schema), any_order=True))


def accepts(grammar: BoundGrammar, value: Any) -> bool:
    matcher = grammar.matcher()
    text = json.dumps(value, separators=(",", ":")).encode()
    return matcher.feed(text) == len(text) and matcher.accept(256)


def test_an_object_with_a_score_of_patterns_does_not_keep_its_order() -> None:
    patterns = {f"^{letter}:[0-9]+$": INTEGER for letter in "abcdefghijklmnopqrst"}
    schema = ABC | CLOSED | {"patternProperties": patterns}
    assert not keeps_order(schema)
    grammar = compiled(schema)
    assert accepts(grammar, {"t:1": 1, "c": "x", "a:12": 2, "b": 3})
    assert not accepts(grammar, {"t:1": 1, "c": "x", "t:a": 2})


@pytest.mark.parametrize("name", SCHEMAS)
def test_exactly_the_valid_objects_are_accepted_in_every_order(name: str) -> None:
    grammar = compiled(SCHEMAS[name])
    is_valid = jsonschema_rs.validator_for(SCHEMAS[name]).is_valid
    values: list[Any] = [
        dict(order)
        for count in range(len(MEMBERS) + 1)
        for chosen in combinations(MEMBERS.items(), count)
        for order in permutations(chosen)
    ]
    values += [
        {"b": 2, "a": "y"},
        {"a": "", "b": 1},
        {"d": [{"b": 1, "a": "x"}]},
        {"d": [{"b": ""}]},
        7,
        "x",
        2,
    ]
    outcomes = [(value, accepts(grammar, value)) for value in values]
    assert [value for value, taken in outcomes if taken != is_valid(value)] == []
    assert {taken for _, taken in outcomes} == {False, True}


@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.parametrize(("least", "most"), [(0, 1), (1, 1), (0, 2), (2, 2), (1, 3)])
def test_an_array_has_as_many_objects_as_its_schema_says(least: int, most: int, unique: bool) -> None:
    count = {"minItems": least, "maxItems": most, "uniqueItems": unique}
    schema = {"type": "array", "items": ABC | CLOSED | {"required": ["a", "b"]}, **count}
    is_valid = jsonschema_rs.validator_for(schema).is_valid
    grammar = compiled(schema)
    values = [[{"b": i, "a": "x"} for i in range(length)] for length in range(5)]
    values += [[{"b": 1}], [{"b": 1, "a": "x"}, {"a": "x", "b": 1}]]
    assert [accepts(grammar, value) for value in values] == [is_valid(value) for value in values]


@pytest.mark.parametrize(("least", "most"), [(0, 1), (1, 1), (0, 2), (2, 2)])
def test_lists_in_a_set_have_as_many_items_as_their_schema_says(least: int, most: int) -> None:
    items = {"type": "array", "items": INTEGER, "minItems": least, "maxItems": most}
    schema = {"type": "array", "items": items, "uniqueItems": True}
    is_valid = jsonschema_rs.validator_for(schema).is_valid
    grammar = compiled(schema)
    values = [[list(range(length)), [7] * length] for length in range(4)]
    assert [accepts(grammar, value) for value in values] == [is_valid(value) for value in values]


def test_arguments_of_calls_come_in_any_order_too() -> None:
    schema = SCHEMAS["one of several is required"]
    call = Concat((Exactly("<call>"), Json(schema, True, "tools", any_order=True)))
    matcher = compiler().compile_here(structure_spec(call)).matcher()
    text = b'<call>{"c":"","b":1,"a":"x"}'
    assert matcher.feed(text) == len(text)
    assert matcher.accept(256)


def test_what_cannot_be_written_in_any_order_keeps_the_order_of_the_schema() -> None:
    names = [f"p{place}" for place in range(70)]
    schema = {
        "type": "object",
        "properties": {name: {"const": 1} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    assert keeps_order(schema)
    grammar = compiled(schema)
    assert accepts(grammar, dict.fromkeys(names, 1))
    assert not accepts(grammar, dict.fromkeys(reversed(names), 1))


@pytest.mark.parametrize("schema", [True, ABC, {"type": "array", "items": ABC}, {"anyOf": [ABC, STRING]}])
def test_an_object_that_is_all_in_one_place_does_not_keep_its_order(schema: Any) -> None:
    assert not keeps_order(schema)


@pytest.mark.parametrize("name", ["one of several is required", "all of several", "listed objects"])
def test_an_object_that_is_not_all_in_one_place_keeps_its_order_as_it_is_written(name: str) -> None:
    assert keeps_order(SCHEMAS[name])
