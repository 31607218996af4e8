import json
import re

import pytest

from personae.errors import GrammarError
from personae.grammar.schema.document import parse_schema, pointer, validator


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('{"type": "object"', "not valid JSON"),
        ("", "not valid JSON"),
        ("[]", "an object, true or false"),
        ('"string"', "an object, true or false"),
        ("null", "an object, true or false"),
        ('{"type": "text"}', 'malformed at #/type: "text" is not one of array, boolean, integer'),
        ('{"items": [{"type": "int"}]}', 'malformed at #/items/0/type: "int" is not one of array, '),
        ('{"type": ["string", "str"]}', 'malformed at #/type/1: "str" is not one of array, '),
        ('{"properties": {"type": "string"}}', "malformed at #/properties/type: .* is not of type"),
        ('{"properties": {"a/b": {"minLength": -1}}}', "malformed at #/properties/a~1b/minLength"),
        ('{"type": "string", "pattern": "("}', "malformed at #/pattern"),
        (
            '{"type": "string", "pattern": "^.{0,100000}$"}',
            re.escape("at #/pattern: '^.{0,100000}$' is not a regular expression, or is too large"),
        ),
        ('{"patternProperties": {"(.": {}}}', re.escape("at #/patternProperties/(.: '(.' is not")),
        ('{"$ref": "#/$defs/none"}', "does not exist"),
        ('{"$ref": "https://example.com/schema.json"}', "example.com"),
        ('{"$schema": [true, null]}', r"\$schema \[true, null\] is not a supported dialect"),
        ('{"$schema": "https://example.com/dialect"}', "not a supported dialect"),
        ('{"$schema": "http://json-schema.org/draft-03/schema#"}', "not a supported dialect"),
        ('{"items":' * 100 + "{}" + "}" * 100, "nested more than"),
        ('{"title": "' + "x" * 1_000_000 + '"}', "longer than 1000000 characters"),
        ('{"items":' * 100_000 + "{}" + "}" * 100_000, "schema"),
    ],
)
def test_a_malformed_schema_is_refused_by_place(source, message):
    with pytest.raises(GrammarError, match=message) as refusal:
        parse_schema(source)
    assert refusal.value.param == "response_format.json_schema.schema"
    assert refusal.value.code == "invalid_schema"


@pytest.mark.parametrize("schema", [{"required": "a" * 5000}, {"properties": {"b": ["a"] * 2000}}])
def test_a_refusal_quotes_the_beginning_of_a_long_value_and_ends_with_what_is_wrong(schema):
    with pytest.raises(GrammarError) as refusal:
        parse_schema(json.dumps(schema))
    assert len(refusal.value.message) < 500
    assert re.fullmatch(r"The schema is malformed at #/\S+: .*aaaaaa.*|.*\[\"a\".*", refusal.value.message)
    assert re.search(r"…a.* is not of types? .*\.$|….*\] is not of types? .*\.$", refusal.value.message)


@pytest.mark.parametrize("source", ["{}", "true", "false", '{"type": "object", "x-own": 1}'])
def test_a_well_formed_schema_is_decoded(source):
    assert parse_schema(source) in ({}, True, False, {"type": "object", "x-own": 1})


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (
            {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 1, "exclusiveMinimum": True},
            2,
            1,
        ),
        ({"items": [{"type": "null"}], "additionalItems": False}, [None], [None, 1]),
        ({"dependencies": {"a": ["b"]}}, {"a": 1, "b": 1}, {"a": 1}),
        ({"prefixItems": [{"type": "null"}], "items": False}, [None], [None, 1]),
        ({"format": "date"}, "2024-02-29", "2023-02-29"),
    ],
)
def test_a_schema_is_read_in_its_own_dialect(schema, valid, invalid):
    assert validator(schema).is_valid(valid)
    assert not validator(schema).is_valid(invalid)


def test_pointers_escape_their_steps():
    assert pointer([]) == "#"
    assert pointer(["a/b", 0, "~"]) == "#/a~1b/0/~0"


def test_a_reference_to_nothing_is_named_where_it_stands() -> None:
    schema = {"properties": {"a": {"properties": {"b": {"$ref": "#/$defs/nope"}}}}, "$defs": {"c": {}}}
    with pytest.raises(GrammarError, match="malformed at #/properties/a/properties/b/\\$ref: "):
        parse_schema(json.dumps(schema))
