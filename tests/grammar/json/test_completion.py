"""What has begun is completed so that the schema holds, as far as an independent validator can tell."""

import json
from itertools import islice
from typing import Any

import jsonschema
import jsonschema_rs
import pytest
from hypothesis import given, settings
from json_schemas import VALUES, schemas

from personae.grammar.json.completion import Completer
from personae.grammar.json.text import Text


def completed(schema: Any, begun: str, *, ordered: bool = True, most: int = 5) -> list[str]:
    completer = Completer(schema, ordered=ordered)
    return [begun + rest for rest in islice(completer.completions(Text(begun)), most)]


@settings(max_examples=80)
@given(schemas(), VALUES)
def test_every_completion_of_every_beginning_is_valid(schema: dict[str, Any], value: Any) -> None:
    written = json.dumps(value)
    for begun in (written[: len(written) // 2], ""):
        for whole in completed(schema, begun, most=3):
            assert jsonschema_rs.is_valid(schema, json.loads(whole)), whole


ADDRESS = {"type": "object", "properties": {"zip": {"pattern": "^[0-9]{5}$"}}, "required": ["zip"]}


def alone(name: str) -> Any:
    """An object with one member."""
    return {"type": "object", "properties": {name: True}, "required": [name], "additionalProperties": False}


CASES: dict[str, tuple[Any, str]] = {
    "names that are required": ({"required": ["a", "b"], "properties": {"b": ADDRESS}}, '{"a":tr'),
    "a set of objects": ({"uniqueItems": True, "minItems": 4, "items": ADDRESS}, '[{"zip":"00000"},'),
    "a set of a few numbers": ({"uniqueItems": True, "minItems": 3, "items": {"enum": [1, 2, 3]}}, "[2"),
    "a count of matches": (
        {"contains": {"const": "x"}, "minContains": 3, "items": {"type": "string"}},
        '["y',
    ),
    "the other branch": (
        {"oneOf": [{"required": ["a"]}, {"required": ["b"], "properties": {"b": {"const": 1}}}]},
        '{"b":',
    ),
    "a condition": (
        {
            "if": {"properties": {"n": {"multipleOf": 7}}, "required": ["n"]},
            "then": {"required": ["big"], "properties": {"big": {"const": True}}},
            "else": {"required": ["small"]},
        },
        '{"n":14,',
    ),
    "a complement": ({"not": {"required": ["a"]}, "minProperties": 2}, '{"'),
    "a dependent schema": (
        {"dependentSchemas": {"a": {"required": ["b"], "properties": {"b": {"minLength": 3}}}}},
        '{"a":1',
    ),
    "names of a pattern": ({"propertyNames": {"pattern": "^x-[a-z]+$"}, "minProperties": 2}, '{"x'),
    "names of the second of two patterns": (
        {
            "patternProperties": {"one_(a|b)": alone("x"), "two_[a-z]+": alone("y")},
            "additionalProperties": False,
        },
        '{"two_c',
    ),
    "multiples of two numbers": ({"allOf": [{"multipleOf": 6}, {"multipleOf": 4}], "minimum": 5}, "1"),
    "a repeated group": ({"type": "string", "pattern": r"^(a|b)\1$"}, '"b'),
    "nothing unevaluated": (
        {
            "anyOf": [{"properties": {"a": {"type": "null"}}, "required": ["a"]}],
            "unevaluatedProperties": False,
        },
        "{",
    ),
    "a member that is unevaluated": (
        {"not": {"anyOf": [True, {"properties": {"a": True}}], "unevaluatedProperties": False}},
        "",
    ),
    "an item that is unevaluated": ({"not": {"prefixItems": [True], "unevaluatedItems": False}}, "["),
    "a begun escape": ({"type": "string", "maxLength": 1}, '"\\u00'),
    "a recursive schema": (
        {
            "$ref": "#/$defs/n",
            "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 0}},
        },
        "[[[[",
    ),
}


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(("schema", "begun"), CASES.values(), ids=CASES)
def test_what_has_begun_is_completed(schema: Any, begun: str, ordered: bool) -> None:
    for start in ("", begun):
        found = completed(schema, start, ordered=ordered)
        assert found, start
        for whole in found:
            assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(whole)), whole


def test_members_come_in_the_order_of_the_schema() -> None:
    names = ["c", "a", "b"]
    schema = {"properties": {name: {"type": "null"} for name in names}, "required": sorted(names)}
    assert [*json.loads(completed(schema, "{")[0])] == names
    assert [*json.loads(completed(schema, '{"a":null,', ordered=False)[0])] == ["a", "c", "b"]


def test_what_has_no_completion_has_none() -> None:
    assert completed({"type": "object", "maxProperties": 1}, '{"a":1,') == []
    assert completed({"items": {"type": "integer", "not": {"type": "number"}}, "minItems": 1}, "[") == []


def test_properties_that_are_named_as_keywords_are_no_keywords() -> None:
    names = ("format", "pattern", "minLength", "enum", "type", "not", "$ref")
    schema = {"properties": {name: {"type": "integer"} for name in names}, "required": ["format", "not"]}
    assert json.loads(completed(schema, "{")[0]) == {"format": 0, "not": 0}


def test_the_same_question_has_the_same_answer() -> None:
    schema, begun = CASES["a set of objects"]
    completer = Completer(schema, ordered=True)
    text = Text(begun)
    assert [*completer.completions(text)] == [*completer.completions(text.fork())]
