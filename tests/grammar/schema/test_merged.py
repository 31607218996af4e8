"""Schemas merged into one place each accept what jsonschema says of the originals."""

import json
from itertools import product
from typing import Any

import jsonschema
import jsonschema_rs
import pytest

from personae.evals.suites.maskbench import byte_vocabulary
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.schema.merged import Unmerged, merged
from personae.grammar.spec import GrammarSpec

COMPILER = GrammarCompiler(byte_vocabulary(), sandboxed=False)
SCALARS = [None, True, 1, 6, 12, 2.5, "a", "abc", "red"]
VALUES: list[Any] = [
    *SCALARS,
    [],
    ["a"],
    [1, "a"],
    ["a", "abc"],
    ["abc"],
    [1, "ab"],
    [1, "ab", "a"],
    [1, "ab", 1],
    {},
]
VALUES += [{name: one} for name, one in product(("a", "b", "x1"), [*SCALARS, {}, {"a": 1}, {"a": {}}])]
VALUES += [
    {"a": 1, "b": "red"},
    {"a": 1, "b": 2},
    {"a": "a", "b": "red", "x1": 6},
    {"a": {"a": 1, "b": "a"}},
    {"a": {"b": "x"}},
]

SCHEMAS: dict[str, Any] = {
    "objects": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": ["integer", "object"]}}, "required": ["a"]},
            {"properties": {"a": {"minimum": 3}, "b": {"type": "string"}}},
        ]
    },
    "a closed object and another": {
        "type": "object",
        "allOf": [
            {"properties": {"a": True, "b": True}, "additionalProperties": False},
            {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        ],
    },
    "two closed objects": {
        "type": "object",
        "allOf": [
            {"properties": {"a": {"type": "integer"}, "b": True}, "additionalProperties": False},
            {"properties": {"a": True}, "additionalProperties": False},
        ],
    },
    "what is required is not allowed": {
        "type": ["object", "null"],
        "allOf": [{"required": ["b"]}, {"properties": {"a": True}, "additionalProperties": False}],
    },
    "names by one pattern": {
        "type": "object",
        "allOf": [
            {"patternProperties": {"^[a-c]": {"type": ["integer", "string"]}}, "additionalProperties": False},
            {"additionalProperties": {"enum": [1, 6, "red", None]}},
        ],
    },
    "names by two patterns": {
        "type": "object",
        "allOf": [
            {"patternProperties": {"^[a-c]": True}, "additionalProperties": False},
            {"patternProperties": {"[b-z]$": {"type": "string"}}, "additionalProperties": False},
        ],
    },
    "alternatives twice": {
        "anyOf": [{"type": "integer"}, {"type": "object"}, {"type": "string", "minLength": 2}],
        "allOf": [{"anyOf": [{"type": "object", "required": ["a"]}, {"enum": [1, "red", "a"]}]}],
    },
    "listed values": {
        "enum": [1, 6, "red", None],
        "allOf": [{"type": ["integer", "null"]}, {"not": {"const": 1}}],
    },
    "numbers": {"type": "number", "allOf": [{"multipleOf": 2}, {"multipleOf": 3}, {"maximum": 10}]},
    "strings": {"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "c$"}, {"maxLength": 5}]},
    "arrays": {
        "type": "array",
        "allOf": [{"items": {"type": "string"}, "minItems": 1}, {"items": {"minLength": 2}, "maxItems": 1}],
    },
    "names of properties": {
        "type": "object",
        "allOf": [
            {"propertyNames": {"pattern": "^[a-z]"}, "additionalProperties": {"type": ["integer", "string"]}},
            {"propertyNames": {"maxLength": 1}, "properties": {"a": {"minimum": 3}, "x1": True}},
        ],
    },
    "strings or counted members": {
        "allOf": [{"pattern": "^a"}, {"pattern": "c$"}, {"minProperties": 1}, {"type": ["string", "object"]}]
    },
    "places of items": {
        "type": "array",
        "allOf": [
            {"prefixItems": [{"type": "integer"}, True]},
            {"prefixItems": [True], "items": {"type": "string"}},
            {"items": {"maxLength": 2}},
        ],
    },
    "a reference with conditions": {
        "$ref": "#/$defs/tree",
        "required": ["a"],
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/tree", "minProperties": 1}, "b": {"type": "string"}},
                "additionalProperties": False,
            }
        },
    },
    "a way that nothing satisfies": {
        "anyOf": [
            {"allOf": [{"type": "object", "required": ["a"]}, {"properties": {"a": False}}]},
            {"type": "array", "allOf": [{"minItems": 1}, {"items": False}]},
            {"type": "integer"},
        ]
    },
}


def judged(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_merged_schema_is_equal(name: str) -> None:
    found = merged(SCHEMAS[name])
    assert found is not None
    assert [judged(found, one) for one in VALUES] == [judged(SCHEMAS[name], one) for one in VALUES]
    assert any(judged(found, one) for one in VALUES)


@pytest.mark.parametrize("name", SCHEMAS)
def test_no_invalid_value_can_be_written(name: str) -> None:
    grammar = COMPILER.compile(GrammarSpec("json_schema", json.dumps(SCHEMAS[name]), compact=True))
    for value in VALUES:
        matcher = grammar.matcher()
        text = json.dumps(value, separators=(",", ":")).encode()
        if matcher.feed(text) == len(text) and matcher.accept(256):
            assert judged(SCHEMAS[name], value), value


def test_a_recursive_schema_with_keywords_next_to_its_reference_is_enforced() -> None:
    schema = SCHEMAS["a reference with conditions"]
    grammar = COMPILER.compile(GrammarSpec("json_schema", json.dumps(schema), compact=True))
    for text, valid in {
        '{"a":{"b":"x"}}': True,
        '{"a":{"a":{"b":"x"},"b":"y"}}': True,
        '{"a":{}}': False,
        '{"b":"x"}': False,
    }.items():
        matcher = grammar.matcher()
        assert (matcher.feed(text.encode()) == len(text) and matcher.accept(256)) is valid, text
        assert judged(schema, json.loads(text)) is valid


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"type": "object"}]},
        {"allOf": [{"contains": {"const": 1}, "maxContains": 1}, {"contains": {"const": 2}}]},
        {"allOf": [{"patternProperties": {"^a": True, "b$": True}}, {"patternProperties": {"c": True}}]},
        {"allOf": [{"$ref": "https://example.com/other"}, {"type": "object"}]},
    ],
)
def test_what_has_no_known_merged_form_is_left(schema: Any) -> None:
    with pytest.raises(Unmerged):
        merged(schema)


def test_an_array_that_must_contain_several_items_begins_with_them() -> None:
    schema = {"type": "array", "allOf": [{"contains": {"type": "integer"}}, {"contains": {"const": "a"}}]}
    found = merged(schema)
    assert judged(found, [1, "a", None])
    assert not any(judged(found, one) and not judged(schema, one) for one in VALUES)


def test_a_schema_that_says_all_in_one_place_is_left_alone() -> None:
    assert merged({"type": "object", "properties": {"a": {"$ref": "#"}}}) is None


def test_a_format_that_is_not_spelled_out_stays_beside_a_pattern() -> None:
    url = {"type": "string", "allOf": [{"format": "uri"}, {"pattern": "^https?://"}]}
    found = merged(
        {"type": "object", "properties": {"url": url}, "anyOf": [{"required": ["url"]}]}, spread=True
    )
    judge = jsonschema_rs.validator_for(found, validate_formats=True)
    assert judge.is_valid({"url": "https://example.org/a"})
    assert not judge.is_valid({"url": "ftp://example.org/a"})
    assert not judge.is_valid({})
