import json
import math

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from json_schemas import VALUES, schemas

from personae.grammar.schema.shortest import shortest_instance

LIST = {"$defs": {"a": {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}}}


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(schemas(), VALUES)
def test_no_valid_instance_is_shorter(schema, instance):
    if jsonschema.Draft202012Validator(schema).is_valid(instance):
        assert shortest_instance(schema) <= len(
            json.dumps(instance, ensure_ascii=False, separators=(",", ":"))
        )


@pytest.mark.parametrize(
    ("schema", "length"),
    [
        (True, 1),
        ({}, 1),
        ({"type": "null"}, 4),
        ({"type": "string", "minLength": 3}, 5),
        ({"type": ["string", "integer"]}, 1),
        ({"enum": ["abc", [1, 2]]}, 5),
        ({"type": "array", "items": {"type": "null"}, "minItems": 2}, len("[null,null]")),
        ({"type": "array", "prefixItems": [{"const": "a"}], "items": {"type": "null"}, "minItems": 2}, 10),
        ({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a", "b"]}, 16),
        ({"anyOf": [{"type": "null"}, {"type": "array"}], "allOf": [{"minItems": 0}]}, 2),
        ({"type": "array", "items": {"$ref": "#"}}, 2),
        ({"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], **LIST}, 4),
    ],
)
def test_the_bound_of_simple_schemas_is_met(schema, length):
    assert shortest_instance(schema) == length


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"$ref": "#/$defs/a", **LIST},
        {"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}},
        {"anyOf": [False, {"$ref": "#"}]},
        {"type": "array", "prefixItems": [True, False], "minItems": 2},
    ],
)
def test_schemas_whose_answers_never_end_have_no_length(schema):
    assert shortest_instance(schema) == math.inf


def test_references_are_followed_to_where_no_keyword_leads():
    schema = {"$ref": "#/own/a", "own": {"a": {"type": "array", "items": {"$ref": "#/own/b"}, "minItems": 1}}}
    assert shortest_instance({**schema, "own": {**schema["own"], "b": {"type": "null"}}}) == len("[null]")
    assert shortest_instance({**schema, "own": {**schema["own"], "b": {"$ref": "#/own/a"}}}) == math.inf


@pytest.mark.parametrize("reference", ["#anchor", "#/$defs/a/items/7", "other.json"])
def test_references_that_are_not_followed_bound_nothing(reference):
    assert shortest_instance({"$ref": reference, "$defs": {"a": {"items": []}}}) == 1
