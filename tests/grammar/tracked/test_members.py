"""What is tracked of members is exact: a grammar accepts what the validator does, and nothing else."""

import json
from collections.abc import Iterator
from functools import cache
from itertools import combinations, permutations, product
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worst import WORST, answer, text_of, text_vocabulary

from personae.errors import GrammarError
from personae.evals.suites.maskbench import byte_vocabulary
from personae.grammar.backend import BoundGrammar
from personae.grammar.bitmask import words_of
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.reasoning.format import Thinks
from personae.grammar.reasoning.registry import reasoning_format
from personae.grammar.sandbox.masks import RemoteGrammar
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.answer import AnswerShape
from personae.grammar.structure.elements import Json, in_any_order
from personae.grammar.tracked.writer import tracked_rules

VOCABULARY = byte_vocabulary()
TEXTS = text_vocabulary()
STRING, INTEGER = {"type": "string"}, {"type": "integer"}
ABC = {"type": "object", "properties": {"a": STRING, "b": INTEGER, "c": STRING}}
CLOSED = {"additionalProperties": False}
OBJECTS: dict[str, dict[str, Any]] = {
    "closed": ABC | CLOSED | {"required": ["a"]},
    "open": ABC | {"required": ["a", "c"]},
    "typed others": ABC | {"additionalProperties": STRING},
    "at most": ABC | CLOSED | {"maxProperties": 2, "minProperties": 1},
    "at most, open": ABC | {"maxProperties": 2, "required": ["b"]},
    "at least": ABC | CLOSED | {"minProperties": 2},
    "at least, open": ABC | {"minProperties": 3},
    "dependent": ABC | CLOSED | {"dependentRequired": {"a": ["b"], "c": ["a"]}},
    "dependent on another": ABC | {"dependentRequired": {"b": ["a", "zz"]}},
    "older": ABC | CLOSED | {"dependencies": {"c": ["a"]}},
    "pattern": ABC | CLOSED | {"patternProperties": {"^z": INTEGER}, "required": ["b"]},
    "barred": {**ABC, "properties": {**ABC["properties"], "zz": False}},
}
ARRAYS: dict[str, dict[str, Any]] = {
    "set": {"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True},
    "set of kinds": {
        "type": "array",
        "items": {"anyOf": [{"const": "a"}, {"type": "boolean"}, {"type": "null"}]},
        "uniqueItems": True,
        "minItems": 2,
        "maxItems": 3,
    },
    "set of integers": {
        "type": ["array", "string"],
        "items": {"type": "integer", "minimum": 0, "maximum": 3},
        "uniqueItems": True,
    },
    "set of texts": {"type": "array", "items": STRING, "uniqueItems": True},
    "set of texts, some": {
        "type": "array",
        "items": STRING,
        "uniqueItems": True,
        "minItems": 2,
        "maxItems": 3,
    },
    "set of one": {"type": "array", "items": STRING, "uniqueItems": True, "maxItems": 1},
    "contains": {"type": "array", "contains": {"const": "a"}},
    "contains two": {"type": "array", "contains": STRING, "minContains": 2},
    "contains at most": {"type": "array", "contains": STRING, "minContains": 0, "maxContains": 1},
    "contains and counts": {"type": "array", "contains": STRING, "minItems": 2, "maxItems": 3},
    "contains from to": {"type": "array", "contains": STRING, "maxContains": 2, "maxItems": 4},
    "contains, of items": {
        "type": "array",
        "items": {"type": ["string", "integer"]},
        "contains": {"const": 1},
        "maxContains": 2,
    },
}
MEMBERS = {"a": "x", "b": 1, "c": "", "zz": 2}
VALUES = ["a", "b", 1, True, None]


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(VOCABULARY, sandboxed=False)


@cache
def compiled(source: str, any_order: bool = False) -> BoundGrammar:
    return compiler().compile_here(GrammarSpec("json_schema", source, any_order=any_order))


def accepts(grammar: BoundGrammar, value: Any) -> bool:
    matcher = grammar.matcher()
    text = json.dumps(value).encode()
    return matcher.feed(text) == len(text) and matcher.accept(256)


def objects(orders: bool) -> Iterator[dict[str, Any]]:
    for count in range(len(MEMBERS) + 1):
        for chosen in combinations(MEMBERS.items(), count):
            yield from map(dict, permutations(chosen) if orders else [chosen])


@pytest.mark.parametrize("any_order", [False, True])
@pytest.mark.parametrize("name", OBJECTS)
def test_of_objects_exactly_the_valid_ones_are_accepted(name: str, any_order: bool) -> None:
    schema = OBJECTS[name]
    is_valid = jsonschema_rs.validator_for(
        schema
        if "dependencies" not in schema
        else {**schema, "$schema": "http://json-schema.org/draft-07/schema#"}
    ).is_valid
    grammar = compiled(json.dumps(schema), any_order)
    outcomes = [(value, accepts(grammar, value)) for value in objects(any_order)]
    assert [value for value, taken in outcomes if taken != is_valid(value)] == []
    assert {taken for _, taken in outcomes} == {False, True}


def test_in_any_order_a_listed_property_is_there_once() -> None:
    grammar = compiled(json.dumps(OBJECTS["open"]), any_order=True)
    matcher = grammar.matcher()
    text = b'{"c":"x","b":1,"a":"y"'
    assert matcher.feed(text) == len(text)
    assert matcher.feed(b',"c"') < 4


@pytest.mark.parametrize("beside", [{}, {"minItems": 1}, {"type": "object", "items": {"type": "null"}}])
def test_in_any_order_means_objects_without_a_type_and_beside_keywords_of_other_types(beside: Any) -> None:
    listed = {"a": {"type": "integer"}, "b": {"type": "string"}}
    schema = {"properties": listed, "required": ["a"], "additionalProperties": False, **beside}
    grammar = compiled(json.dumps(schema), any_order=True)
    is_valid = jsonschema_rs.validator_for(schema).is_valid
    values = [
        {"a": 1, "b": ""},
        {"b": "", "a": 1},
        {"b": "", "a": ""},
        {"b": ""},
        [],
        [{}],
        "a",
        0.5,
        None,
        True,
    ]
    assert [value for value in values if accepts(grammar, value) != is_valid(value)] == []
    many = [{"b": "", "a": 1}, 1]
    inner = compiled(json.dumps({"type": "array", "items": schema, "properties": {}}), any_order=True)
    assert accepts(inner, many) is all(map(is_valid, many))


def test_a_number_that_is_not_whole_is_no_multiple() -> None:
    multiples = {"anyOf": [{"multipleOf": 33}, {"multipleOf": 12}]}
    schema = {"type": "number", "allOf": [multiples, {"not": {"multipleOf": 7}}], "exclusiveMaximum": -100}
    grammar = compiler().compile(GrammarSpec("json_schema", json.dumps(schema)))
    assert not isinstance(grammar, RemoteGrammar)
    is_valid = jsonschema_rs.validator_for(schema).is_valid
    assert [
        value for value in (-100.5, -108.25, -113, -84) if accepts(grammar, value) or is_valid(value)
    ] == []
    assert accepts(grammar, -132)


@pytest.mark.parametrize("name", ARRAYS)
def test_of_arrays_exactly_the_valid_ones_are_accepted(name: str) -> None:
    schema = ARRAYS[name]
    is_valid = jsonschema_rs.validator_for(schema).is_valid
    grammar = compiled(json.dumps(schema))
    outcomes = [
        (list(value), accepts(grammar, list(value)))
        for count in range(5)
        for value in product(VALUES, repeat=count)
    ]
    assert [value for value, taken in outcomes if taken != is_valid(value)] == []
    assert {taken for _, taken in outcomes} == {False, True}


TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["tags"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize("any_order", [False, True])
def test_what_is_counted_may_lie_behind_references_and_alternatives(any_order: bool) -> None:
    grammar = compiled(json.dumps(TREE), any_order)
    for value in (
        {"tags": ["a", "b"], "kids": [{"tags": []}, {"tags": ["b"], "next": None}]},
        {"tags": [], "next": {"tags": ["a"], "kids": []}},
    ):
        assert accepts(grammar, value)
    assert accepts(grammar, {"kids": [{"next": None, "tags": []}], "tags": []}) is any_order
    for value in ({"tags": ["a", "a"]}, {"tags": [], "kids": [{"tags": ["b", "b"]}]}, {"kids": []}):
        assert not accepts(grammar, value)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "items": {"type": "object"}, "uniqueItems": True}, "uniqueItems"),
        (
            {
                "type": "object",
                "patternProperties": {"^[a-z]$": {}},
                "additionalProperties": False,
                "minProperties": 2,
            },
            "minProperties",
        ),
        ({"type": "array", "prefixItems": [STRING], "contains": {"const": 3}}, "contains"),
    ],
)
def test_what_cannot_be_counted_is_refused_by_its_keyword(schema: dict[str, Any], keyword: str) -> None:
    with pytest.raises(GrammarError, match=f"'{keyword}'"):
        compiled(json.dumps(schema))


@pytest.mark.parametrize("name", [*OBJECTS, *ARRAYS])
@settings(max_examples=6)
@given(prefer=st.sampled_from(sorted(WORST)), spare=st.integers(0, 40), any_order=st.booleans())
def test_an_answer_closes_and_is_valid(name: str, prefer: str, spare: int, any_order: bool) -> None:
    schema = (OBJECTS | ARRAYS)[name]
    grammar = _textual(json.dumps(schema), any_order)
    budget = grammar.shortest + spare
    ids = answer(grammar.matcher(budget), TEXTS, WORST[prefer], budget, spare)
    text = text_of(ids, TEXTS)
    assert jsonschema_rs.validator_for(schema).is_valid(json.loads(text)), text


@cache
def _textual(source: str, any_order: bool) -> BoundGrammar:
    made = GrammarCompiler(TEXTS, sandboxed=False)
    return made.compile_here(GrammarSpec("json_schema", source, any_order=any_order))


def test_it_binds_behind_reasoning_as_well() -> None:
    shape = AnswerShape(
        reasoning_format("think"), Thinks.OPEN, content=Json(OBJECTS["closed"] | CLOSED, True, "schema")
    )
    spec = shape.spec()
    assert spec is not None
    text = b'hm</think>{"c":"x","a":"y"}'
    in_order, any_order = (compiler().compile_here(one).matcher() for one in (spec, in_any_order(spec)))
    assert in_order.feed(text) < len(text)
    assert any_order.feed(text) == len(text)
    assert any_order.accept(256)


@pytest.mark.parametrize("any_order", [False, True])
@pytest.mark.parametrize(
    ("schema", "whole"),
    [
        ({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}, '["a","b"'),
        ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "maxItems": 1}, "[true"),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
                "additionalProperties": False,
                "minProperties": 2,
            },
            '{"a":null,"b":null',
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}},
                "additionalProperties": False,
                "maxProperties": 2,
            },
            '{"a":null,"c":null',
        ),
    ],
)
def test_no_comma_is_allowed_where_no_member_is_left(schema: dict, whole: str, any_order: bool) -> None:
    compiler = GrammarCompiler(byte_vocabulary(), sandboxed=False)
    spec = GrammarSpec("json_schema", json.dumps(schema), any_order=any_order)
    matcher = compiler.compile(spec).matcher()
    assert matcher.feed(whole.encode()) == len(whole)
    assert matcher.follows(b",") == 0
    mask = np.zeros((1, words_of(257)), np.int32)
    matcher.fill(mask, 0)
    assert not mask[0, ord(",") // 32] >> ord(",") % 32 & 1
    assert matcher.feed(b"]" if whole[0] == "[" else b"}") == 1
    assert matcher.accept(256)


@pytest.mark.parametrize("any_order", [False, True])
@pytest.mark.parametrize("bounds", [{"minProperties": 2}, {"maxProperties": 2}, {"required": ["a", "c"]}, {}])
@pytest.mark.parametrize("others", [False, {"type": "null"}])
def test_a_comma_is_allowed_exactly_where_another_member_may_follow(
    bounds: dict[str, Any], others: Any, any_order: bool
) -> None:
    names = ["a", "b", "c"]
    schema = {
        "type": "object",
        "properties": {name: {"type": "null"} for name in names},
        "additionalProperties": others,
        **bounds,
    }
    grammar = compiled(json.dumps(schema), any_order)
    commas = set()
    for order in (order for count in (1, 2, 3) for order in permutations(names, count)):
        matcher = grammar.matcher()
        begun = "{" + ",".join(f'"{name}":null' for name in order)
        if matcher.feed(begun.encode()) < len(begun):
            continue
        comma = matcher.follows(b",") == 1
        more = [
            name for name in (*names, "x") if matcher.follows(f',"{name}":null'.encode()) == len(name) + 8
        ]
        assert comma is bool(more), order
        commas.add(comma)
    assert True in commas


def test_what_an_array_must_contain_may_refer_to_definitions() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "array",
        "items": {"$ref": "#/$defs/item"},
        "contains": {"$ref": "#/$defs/large"},
        "$defs": {
            "unused": {"type": "object", "properties": {"a": {"$ref": "#/$defs/unused"}}},
            "item": {"$ref": "#/$defs/whole"},
            "whole": {"type": "integer"},
            "large": {"type": "integer", "minimum": 7},
        },
    }
    is_valid = jsonschema_rs.validator_for(schema).is_valid
    grammar = compiled(json.dumps(schema))
    values = [list(value) for count in range(4) for value in product([1, 7, 10, "x"], repeat=count)]
    assert [value for value in values if accepts(grammar, value) != is_valid(value)] == []


def test_references_to_one_definition_share_a_rule() -> None:
    listed = {name: {"$ref": "#/$defs/text"} for name in "abc"}
    schema = {
        "type": "object",
        "properties": listed,
        "additionalProperties": False,
        "$defs": {"text": {"type": "string", "pattern": "^x"}},
    }
    rules = tracked_rules(schema, json.dumps, json.dumps, None, any_order=True).text
    assert rules is not None
    assert rules.count('"pattern"') == 1
