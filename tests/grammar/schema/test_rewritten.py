"""Schemas that are enforced only in another form accept exactly what jsonschema says."""

import json
from itertools import product
from typing import Any

import jsonschema
import pytest

from personae.errors import GrammarError
from personae.evals.suites.maskbench import byte_vocabulary
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.schema.listed import with_values_left
from personae.grammar.schema.overlaps import without_overlaps
from personae.grammar.schema.rewritten import rewritten
from personae.grammar.spec import GrammarSpec

COMPILER = GrammarCompiler(byte_vocabulary(), sandboxed=False)
SCALARS = [None, True, False, 0, 1, 2, 3, 20, 21, -1, 0.5, 2.5, 3.25, 10.25, "", "a", "1", "red"]
VALUES = [*SCALARS, *([one] for one in SCALARS), [2, 4], [1, 2], {}, {"foo": "bar"}, {"foo": 1}]
NAMES = ["a", "aa", "aaa", "b", "ab", "X_", "X_12", "31", "a31b", "c"]
OBJECTS = [{}, *({name: value} for name, value in product(NAMES, SCALARS))]

LISTED: dict[str, Any] = {
    "listed, but not some": {"allOf": [{"enum": [[1], [True], "a", 2]}, {"not": {"enum": [[True]]}}]},
    "an object, but not others": {"const": {"foo": "bar"}, "not": {"required": ["baz"]}},
    "listed within bounds": {"enum": [0, 1, 2, 3, "red", None], "minimum": 2},
    "one of two lists": {"oneOf": [{"enum": [[1], [2, 4], "a"]}, {"enum": [[1], [1, 2]]}]},
    "listed elsewhere": {
        "allOf": [{"$ref": "#/$defs/colour"}, {"not": {"const": "red"}}],
        "$defs": {"colour": {"enum": ["red", "a", "", 1]}},
    },
    "listed in a property": {
        "type": "object",
        "properties": {"foo": {"enum": ["bar", 1, [1]], "type": ["string", "array"], "not": {"maxItems": 1}}},
        "additionalProperties": False,
    },
    "listed in a property, but not one": {
        "properties": {"foo": {"allOf": [{"enum": ["bar", 1]}, {"not": {"const": 1}}]}},
        "additionalProperties": False,
    },
    "a number or a greater one": {"oneOf": [{"type": "integer"}, {"minimum": 2}]},
    "not whole, between bounds": {"type": "number", "not": {"type": "integer"}, "minimum": 0, "maximum": 3},
    "not whole, below": {"type": "number", "not": {"multipleOf": 1}, "exclusiveMaximum": 3},
}
OVERLAPPING: dict[str, Any] = {
    "one pattern within another": {
        "type": "object",
        "patternProperties": {"a*": {"type": "integer"}, "aaa*": {"maximum": 20}},
    },
    "patterns that may meet": {
        "type": "object",
        "patternProperties": {"[0-9]{2,}": {"type": "boolean"}, "X_": {"type": "string"}},
    },
    "a listed name that matches both": {
        "type": "object",
        "properties": {"ab": {"type": "integer"}},
        "patternProperties": {"a": {"minimum": 3}, "b": {"maximum": 20}},
    },
    "no other names": {
        "type": "object",
        "patternProperties": {"^a": {"type": ["integer", "string"]}, "b$": {"type": "integer"}},
        "additionalProperties": False,
    },
    "three": {
        "type": "object",
        "patternProperties": {"a": {"type": "number"}, "aa": {"minimum": 1}, "^a+$": {"maximum": 20}},
    },
}


def accepted(schema: Any, instance: Any) -> bool:
    spec = GrammarSpec("json_schema", json.dumps(schema), compact=True)
    found = COMPILER.get(spec)
    if found is None:
        found = COMPILER.compile(spec)
        COMPILER.put(spec, found)
    text = json.dumps(instance, separators=(",", ":")).encode()
    matcher = found.matcher()
    return matcher.feed(text) == len(text) and matcher.accept(256)


@pytest.mark.parametrize("name", LISTED)
def test_values_are_accepted_as_jsonschema_says(name: str) -> None:
    schema = LISTED[name]
    judge = jsonschema.Draft202012Validator(schema)
    verdicts = {judge.is_valid(one) for one in VALUES}
    assert verdicts == {True, False}
    for one in VALUES:
        assert accepted(schema, one) is judge.is_valid(one), one


@pytest.mark.parametrize("name", OVERLAPPING)
def test_objects_whose_patterns_overlap_are_accepted_as_jsonschema_says(name: str) -> None:
    schema = OVERLAPPING[name]
    judge = jsonschema.Draft202012Validator(schema)
    apart = jsonschema.Draft202012Validator(without_overlaps(schema))
    for one in OBJECTS:
        assert apart.is_valid(one) is judge.is_valid(one), one
        assert accepted(schema, one) is judge.is_valid(one), one
    assert not all(map(judge.is_valid, OBJECTS))


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [1, 2]},
        {"type": "string", "enum": ["a"]},
        {"anyOf": [{"const": 1}, {"const": 2}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"enum": [1]}}},
        {"type": "object", "properties": {"enum": {"type": "string"}}},
    ],
)
def test_a_plain_list_of_values_stays_as_it_is(schema: dict[str, Any]) -> None:
    assert with_values_left(schema) == schema


UNIONS = [
    # A property that the other cannot have keeps them apart.
    (
        [
            {
                "type": "object",
                "properties": {"url": {"type": "string"}, "n": {"type": "integer"}},
                "required": ["url"],
            },
            {
                "type": "object",
                "additionalProperties": {"enum": [False]},
                "minProperties": 1,
            },
        ],
        [{"url": "a"}],
        [{"x": True, "n": 1.5}],
    ),
    (
        [
            {"type": "object", "properties": {"v": {"type": "string"}}, "required": ["v"]},
            {
                "type": "object",
                "properties": {"v": {"type": "string"}, "w": {"type": "null"}},
                "required": ["v", "w"],
            },
        ],
        [{"v": "a"}],
        [{"v": "a", "w": None}, {}],
    ),
]


@pytest.mark.parametrize(("branches", "written", "invalid"), UNIONS)
def test_of_one_of_with_objects_that_overlap_nothing_invalid_is_accepted(
    branches: list[Any], written: list[Any], invalid: list[Any]
) -> None:
    schema = {"oneOf": branches}
    judge = jsonschema.Draft202012Validator(schema)
    for one in written:
        assert judge.is_valid(one)
    for one in (*invalid, *OBJECTS, *({"v": a, "w": b} for a, b in product(SCALARS, SCALARS))):
        assert judge.is_valid(one) or not accepted(schema, one), one
    assert any(accepted(schema, one) for one in written)


@pytest.mark.parametrize("any_order", [False, True])
def test_no_form_comes_twice(any_order: bool) -> None:
    several = 0
    for schema in [*LISTED.values(), *OVERLAPPING.values()]:
        forms = [json.dumps(form) for form in rewritten(schema, any_order=any_order)]
        assert len(forms) == len({*forms})
        several += len(forms) > 2
    assert several > 5


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\r"])
def test_a_listed_value_that_is_the_end_of_a_line_is_not_found_by_a_dot(end: str) -> None:
    here = {"pattern": "^.$", "enum": [end, "b"]}
    assert with_values_left(here) == {"enum": ["b"]}
    with pytest.raises(GrammarError):
        COMPILER.compile_here(GrammarSpec("json_schema", json.dumps({"pattern": "^.$", "enum": [end]})))
