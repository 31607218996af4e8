"""Conditions rewritten by De Morgan's laws accept nothing that the schema does not, judged by jsonschema."""

import json
from itertools import product
from typing import Any

import jsonschema
import pytest

from personae.evals.suites.maskbench import byte_vocabulary
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.schema.complements import Inexpressible, without_conditions
from personae.grammar.spec import GrammarSpec

COMPILER = GrammarCompiler(byte_vocabulary(), sandboxed=False)
SCALARS = [None, True, False, 0, 1, 2, 3, 10, -1, 0.5, 2.5, "", "a", "ab", "abc", "red", "2020-01-01"]
FEW = [None, True, 1, 2, 2.5, "a", "abc", "red"]
ARRAYS = [[], *([one] for one in FEW), [1, 2], ["a", "a"], [1, "a"], ["a", 1, 2]]
OBJECTS = [{}, *({name: one} for name, one in product(("a", "b", "x"), FEW))]
OBJECTS += [{"a": 1, "b": one} for one in FEW] + [{"a": "red", "b": 1}, {"a": 1, "b": 2, "x": 3}]
VALUES = [*SCALARS, *ARRAYS, *OBJECTS]

EXACT: dict[str, Any] = {
    "not a type": {"not": {"type": ["integer", "string"]}},
    "not listed": {"not": {"enum": ["a", 1, True, None]}},
    "neither required": {"not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}},
    "not both required": {"type": "object", "not": {"required": ["a", "b"]}},
    "not a property's value": {"type": "object", "not": {"properties": {"a": {"type": "string"}}}},
    "not a range": {"not": {"type": "number", "minimum": 1, "exclusiveMaximum": 3}},
    "not a pattern of a length": {"type": "string", "not": {"pattern": "^a", "maxLength": 2}},
    "not an item": {"type": "array", "not": {"items": {"type": "string"}}},
    "no item": {"type": "array", "not": {"contains": {"type": "string"}}},
    "not the first items": {"type": "array", "not": {"prefixItems": [{"type": "integer"}, {"const": "a"}]}},
    "not a number of members": {"not": {"minProperties": 1, "maxItems": 1, "minLength": 2}},
    "a double negation": {"not": {"not": {"type": "object", "required": ["a"]}}},
    "either, but not both": {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "not one of two": {"type": "object", "not": {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}},
    "a condition": {
        "type": "object",
        "if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
        "then": {"required": ["b"]},
        "else": {"properties": {"b": {"type": "string"}}},
    },
    "not a condition": {
        "type": "object",
        "not": {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"required": ["x"]}},
    },
    "not what another requires": {"type": "object", "not": {"dependentRequired": {"a": ["b"]}}},
    "not what another says": {"type": "object", "not": {"dependentSchemas": {"a": {"maxProperties": 1}}}},
    "by reference": {"not": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": ["string", "object", "null"]}}},
}
SOUND: dict[str, Any] = {
    "not closed": {"type": "object", "not": {"properties": {"a": True}, "additionalProperties": False}},
    "not such names": {"type": "object", "not": {"propertyNames": {"pattern": "^[ab]"}}},
    "not by a pattern": {"type": "object", "not": {"patternProperties": {"^[ab]": {"type": "integer"}}}},
    "not a multiple": {"type": "number", "not": {"multipleOf": 2}},
    "not a format": {"type": "string", "not": {"format": "date"}},
    "one of three": {"oneOf": [{"type": "integer"}, {"minimum": 2}, {"enum": ["a", 3]}]},
    "not that many": {"type": "array", "not": {"contains": {"type": "string"}, "maxContains": 1}},
    "not a tree": {
        "type": "object",
        "not": {"$ref": "#/$defs/tree"},
        "$defs": {"tree": {"properties": {"a": {"$ref": "#/$defs/tree"}}, "required": ["b"]}},
    },
    "overlapping objects": {
        "type": "object",
        "oneOf": [
            {"properties": {"a": {"enum": ["red"]}, "b": {"type": "string"}}},
            {"properties": {"a": {"enum": [1, 2]}, "b": {"type": "integer"}}},
        ],
    },
}


def judged(schema: Any, value: Any) -> bool:
    draft = jsonschema.Draft202012Validator
    return bool(draft(schema, format_checker=draft.FORMAT_CHECKER).is_valid(value))


@pytest.mark.parametrize("by_tags", [False, True])
@pytest.mark.parametrize("name", [*EXACT, *SOUND])
def test_the_rewritten_schema_accepts_nothing_more(name: str, by_tags: bool) -> None:
    schema = {**EXACT, **SOUND}[name]
    rewritten = without_conditions(schema, by_tags=by_tags)
    assert rewritten is not None
    assert not [one for one in VALUES if judged(rewritten, one) and not judged(schema, one)]
    assert any(judged(rewritten, one) for one in VALUES) or name == "not a format"


@pytest.mark.parametrize("name", EXACT)
def test_where_each_violation_can_be_written_nothing_is_lost(name: str) -> None:
    rewritten = without_conditions(EXACT[name])
    assert [judged(rewritten, one) for one in VALUES] == [judged(EXACT[name], one) for one in VALUES]


@pytest.mark.parametrize("name", [*EXACT, *SOUND])
def test_no_invalid_value_can_be_written(name: str) -> None:
    schema = {**EXACT, **SOUND}[name]
    grammar = COMPILER.compile(GrammarSpec("json_schema", json.dumps(schema), compact=True))
    for value in VALUES:
        matcher = grammar.matcher()
        text = json.dumps(value, separators=(",", ":")).encode()
        if matcher.feed(text) == len(text) and matcher.accept(256):
            assert judged(schema, value), value


def test_keywords_of_draft_4_keep_their_meaning() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "not": {"type": "number", "minimum": 1, "exclusiveMinimum": True},
    }
    rewritten = without_conditions(schema)
    judge = jsonschema.Draft4Validator(schema)
    numbers = [-1, 0.5, 1, 1.5, 2]
    assert [judged(rewritten, one) for one in numbers] == [judge.is_valid(one) for one in numbers]


def test_a_reference_into_a_condition_is_left_alone() -> None:
    schema = {"if": {"required": ["a"]}, "then": {"properties": {"a": {"const": 1}}}}
    assert without_conditions({**schema, "allOf": [{"$ref": "#/then/properties/a"}]}) is None


def test_a_schema_without_conditions_is_left_alone() -> None:
    assert without_conditions({"type": "object", "required": ["a"]}) is None


def test_conditions_that_multiply_are_given_up() -> None:
    schema: Any = {"required": ["a"]}
    for place in range(12):
        schema = {"oneOf": [schema, {"required": [f"b{place}"]}, {"required": [f"c{place}"]}]}
    with pytest.raises(Inexpressible):
        without_conditions(schema)


@pytest.mark.parametrize(
    "barred",
    [{"uniqueItems": True}, {"type": "integer", "multipleOf": 7}, {"multipleOf": 0.5}, {"pattern": "(a)\\1"}],
)
def test_a_violation_that_cannot_be_written_is_not_left_out(barred: Any) -> None:
    with pytest.raises(Inexpressible):
        without_conditions({"not": barred})
