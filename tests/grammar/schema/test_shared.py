import json

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from json_schemas import VALUES, schemas

from personae.grammar.schema import shared as sharing
from personae.grammar.schema.shared import shared, shared_as_written

LARGE = {
    "type": "object",
    "properties": {f"property number {n}": {"type": "string", "maxLength": n} for n in range(9)},
    "additionalProperties": False,
}


def accepts(schema, instance):
    return jsonschema.Draft202012Validator(schema).is_valid(instance)


def test_what_occurs_again_is_a_definition_that_is_written_once():
    outer = {"type": "array", "items": LARGE, "minItems": 1}
    schema = {"type": "object", "properties": {"a": LARGE, "b": outer, "c": outer, "d": {"type": "null"}}}
    written = shared(schema)
    assert len(written["$defs"]) == 2
    assert json.dumps(written).count("property number 3") == 1
    assert written["properties"]["b"] == written["properties"]["c"] != written["properties"]["a"]
    assert written["properties"]["d"] == {"type": "null"}
    for instance, valid in (({"a": {}, "b": [{}]}, True), ({"c": [{"x": 1}]}, False), ({"b": []}, False)):
        assert accepts(written, instance) == accepts(schema, instance) == valid


def test_what_occurs_once_or_is_small_is_left_alone():
    schema = {"properties": {"a": LARGE, "b": {"type": "null"}, "c": {"type": "null"}}}
    assert shared(schema) is schema
    assert shared(True) is True


def test_the_order_of_properties_is_kept_and_names_that_are_taken_are_not_used():
    reordered = LARGE | {"properties": dict(reversed(LARGE["properties"].items()))}
    schema = {
        "$defs": {"shared-0": {"const": 1}},
        "prefixItems": [LARGE, reordered, LARGE, {"$ref": "#/$defs/shared-0"}],
    }
    written = shared(schema)
    assert written["$defs"]["shared-0"] == {"const": 1}
    first, other, again, _ = written["prefixItems"]
    assert first == again != other == reordered
    assert list(written["$defs"]["shared-0-"]["properties"]) == list(LARGE["properties"])


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(schemas(), schemas(), st.lists(VALUES, min_size=3, max_size=6))
def test_a_schema_and_its_shared_form_accept_the_same(schema, other, instances):
    part = {keyword: value for keyword, value in other.items() if keyword not in ("$defs", "$ref")}
    document = {
        **schema,
        "allOf": [
            {"items": part, "properties": {"a": part, "b": {"anyOf": [part, schema.get("items", True)]}}}
        ],
    }
    least, sharing._LEAST = sharing._LEAST, 8
    try:
        written = shared(document)
    finally:
        sharing._LEAST = least
    for instance in instances:
        assert accepts(written, instance) == accepts(document, instance)


@pytest.mark.parametrize(
    "part",
    [
        {"$ref": "#/properties/a/properties/property number 3"},
        {"$ref": "#/$defs/b/properties/property number 3"},
        {"$ref": "https://example.org/other"},
        {"$id": "https://example.org/part", "$ref": "#/$defs/b", "$defs": {"b": LARGE}},
    ],
)
def test_what_is_referred_to_stays_where_it_is(part):
    schema = {"properties": {"a": LARGE, "b": LARGE, "c": part}, "$defs": {"b": LARGE}}
    assert shared_as_written(schema) is schema
    plain = schema | {"properties": {"a": LARGE, "b": LARGE, "c": {"$ref": "#/$defs/b"}}}
    written = shared_as_written(plain)
    assert "$ref" in written["properties"]["a"]
    assert accepts(written, {"c": {"x": 1}}) is accepts(plain, {"c": {"x": 1}}) is False
