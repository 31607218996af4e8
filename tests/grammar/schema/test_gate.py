"""The probes behind the gate: what it says of a backend is what the backend does."""

import contextlib
import json

import pytest
from byte_bpe import byte_level_vocabulary
from grammar_walks import accepts

from personae.errors import GrammarError
from personae.grammar.registry import make_backend
from personae.grammar.schema.document import validator
from personae.grammar.schema.gate import ASSERTIONS, strip, unenforced
from personae.grammar.schema.prepare import refusal, weakened
from personae.grammar.spec import GrammarSpec

VOCABULARY = byte_level_vocabulary()
BACKENDS = {name: make_backend(name, VOCABULARY) for name in ("llguidance", "xgrammar")}

# (schema, texts of instances that it does not accept)
PROBES = [
    ({"type": "string"}, ["1", '"\x01"']),
    ({"type": ["string", "null"]}, ["1", "true"]),
    ({"enum": ["a", 1, None]}, ['"b"', "2"]),
    ({"const": {"a": [1]}}, ['{"a":[2]}', "{}"]),
    ({"type": "string", "const": 1}, ["1", '"1"']),
    ({"$ref": "#/$defs/a", "maxLength": 1, "$defs": {"a": {"type": "string"}}}, ['"ab"', "1"]),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}], "maxLength": 1}, ['"ab"', "true"]),
    ({"allOf": [{"type": "string"}, {"maxLength": 1}, {"pattern": "a"}]}, ['"b"', '"aa"', "1"]),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["true", "1.5"]),
    ({"oneOf": [{"type": "integer", "minimum": 1}, {"type": "integer", "maximum": 3}]}, ["2"]),
    ({"not": {"type": "integer"}}, ["1"]),
    ({"type": "integer", "not": {"const": 2}}, ["2"]),
    ({"if": {"type": "integer"}, "then": {"minimum": 3}}, ["1"]),
    ({"type": "object", "properties": {"a": {"type": "null"}}}, ['{"a":1}', '{"\\u0061":1}']),
    ({"type": "object", "properties": {"é": {"type": "null"}}}, ['{"é":1}']),
    ({"type": "object", "properties": {"a": {}}, "required": ["a"]}, ["{}", '{"b":1}']),
    ({"type": "object", "required": ["a", "b"]}, ["{}", '{"a":1}']),
    ({"type": "object", "additionalProperties": {"type": "null"}}, ['{"a":1}']),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": False}, ['{"b":1}']),
    ({"type": "object", "patternProperties": {"^a": {"type": "null"}}}, ['{"ab":1}']),
    ({"type": "object", "propertyNames": {"maxLength": 1}}, ['{"ab":1}']),
    ({"type": "object", "minProperties": 1}, ["{}"]),
    ({"type": "object", "minProperties": 2}, ["{}", '{"a":1}', '{"a":1,"a":2}']),
    ({"type": "object", "maxProperties": 1}, ['{"a":1,"b":2}']),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, ['{"a":1}']),
    ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, ['{"a":1}']),
    ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, ['{"b":1}']),
    ({"type": "array", "items": {"type": "null"}}, ["[1]", "[null,1]"]),
    ({"type": "array", "prefixItems": [{"type": "null"}], "items": False}, ["[1]", "[null,1]"]),
    (
        {"type": "array", "items": [{"type": "null"}], "additionalItems": {"type": "string"}},
        ["[1]", "[null,1]"],
    ),
    ({"type": "array", "minItems": 2}, ["[]", "[1]"]),
    ({"type": "array", "maxItems": 1}, ["[1,2]"]),
    ({"type": "array", "uniqueItems": True}, ["[1,1]"]),
    ({"type": "array", "contains": {"type": "null"}}, ["[]", "[1]"]),
    ({"type": "array", "contains": {"type": "null"}, "maxContains": 1}, ["[null,null]"]),
    ({"type": "array", "unevaluatedItems": False}, ["[1]"]),
    ({"type": "string", "minLength": 2}, ['"a"', '"é"', '"\\n"', '"a\x01"']),
    ({"type": "string", "maxLength": 1}, ['"ab"', '"éé"', '"\x01"']),
    ({"type": "string", "pattern": "^a+$"}, ['"b"', '"ab"', '""']),
    ({"type": "string", "pattern": "^[^b]$"}, ['"b"', '"\x01"']),
    ({"type": "string", "format": "date"}, ['"x"', '"2023-02-29"', '"2023-04-31"', '"2023-13-01"']),
    ({"type": "string", "format": "date-time"}, ['"2023-02-30T00:00:00Z"', '"2023-01-01"']),
    ({"type": "string", "format": "time"}, ['"25:00:00Z"', '"x"']),
    ({"type": "string", "format": "duration"}, ['"x"', '"P"']),
    ({"type": "string", "format": "email"}, ['"x"', '"@"']),
    ({"type": "string", "format": "hostname"}, ['"-x"', '"a..b"']),
    ({"type": "string", "format": "ipv4"}, ['"256.0.0.1"', '"1.2.3"']),
    ({"type": "string", "format": "ipv6"}, ['"::g"', '"1:2"']),
    ({"type": "string", "format": "uuid"}, ['"x"', '"00000000-0000-0000-0000-00000000000"']),
    ({"type": "string", "format": "uri"}, ['"x y"', '"//a"']),
    ({"type": "string", "format": "json-pointer"}, ['"a"']),
    ({"type": "string", "format": "regex"}, ['"("']),
    ({"type": "integer"}, ["1.5", '"1"', "01"]),
    ({"type": "integer", "minimum": 3, "maximum": 12}, ["2", "13", "-4"]),
    ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5}, ["3", "5"]),
    ({"type": "integer", "maximum": 2**53 + 1}, [str(2**53 + 2)]),
    ({"type": "integer", "multipleOf": 3}, ["4", "-5"]),
    ({"type": "number", "minimum": 1.5}, ["1.4", "1", "-2.5", "1e-1"]),
    ({"type": "number", "multipleOf": 0.5}, ["1.25"]),
    ({"minimum": 3}, ["2"]),
    ({"const": "a\0b"}, ['"ab"']),
    ({"enum": [{"a\x7f": 1}]}, ['{"a":1}']),
    ({"type": "object", "properties": {"a\0": {"type": "null"}}, "required": ["a\0"]}, ['{"a":null}']),
    ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, ["{}"]),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}, ['{"a":1,"b":1}']),
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2, "required": ["a"]},
        ['{"a":1}'],
    ),
    ({"$ref": "#n", "$defs": {"a": {"$dynamicAnchor": "n", "type": "null"}}}, ["1"]),
    ({"maxLength": 1}, ['"ab"']),
]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("schema", "texts"), PROBES, ids=[json.dumps(schema) for schema, _ in PROBES])
def test_what_the_gate_lets_through_is_enforced(name, schema, texts):
    if next(unenforced(schema, name), None) is not None:
        return
    try:
        grammar = BACKENDS[name].compile(GrammarSpec("json_schema", json.dumps(schema)))
    except GrammarError:
        return
    for text in texts:
        with contextlib.suppress(json.JSONDecodeError):
            assert not validator(schema).is_valid(json.loads(text))
        assert not accepts(grammar.matcher(), VOCABULARY, text.encode())


def test_the_gate_lets_through_what_llguidance_is_there_for():
    served = [schema for schema, _ in PROBES if next(unenforced(schema, "llguidance"), None) is None]
    assert len(served) > len(PROBES) / 2


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("keyword", ["not", "if", "contains", "unevaluatedItems", "$dynamicRef", "extends"])
def test_a_keyword_that_no_probe_cleared_does_not_pass(name, keyword):
    assert keyword in ASSERTIONS
    assert [one.keyword for one in unenforced({keyword: True}, name)] == [keyword]


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"items": {"type": "integer", "multipleOf": 1_000_003}}, ("items", "multipleOf")),
        ({"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 1009}]}, ("allOf",)),
        ({"multipleOf": 997, "allOf": [{"multipleOf": 1009}]}, ("allOf",)),
    ],
)
def test_multiples_of_more_than_can_be_followed_in_time_do_not_pass(schema, path):
    assert [one.path for one in unenforced(schema, "llguidance")] == [path]


@pytest.mark.parametrize("multiple", [100_000, 1e5, 255.99, 0.0001, 1e-8])
def test_multiples_that_are_followed_in_time_pass(multiple):
    schema = {"allOf": [{"multipleOf": multiple}, {"multipleOf": 5}, {"type": "number"}]}
    assert next(unenforced(schema, "llguidance"), None) is None


def test_findings_carry_path_and_value():
    schema = {"properties": {"a": {"items": {"uniqueItems": True}}}}
    (finding,) = unenforced(schema, "llguidance")
    assert finding.path == ("properties", "a", "items", "uniqueItems")
    assert finding.value is True


def test_a_refusal_names_the_keyword_that_the_caller_wrote():
    document = {"properties": {"x/y": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}
    (finding,) = unenforced({"not": {"multipleOf": 1}}, "llguidance")
    assert "'oneOf' at #/properties/x~1y/oneOf" in refusal(document, finding).message


def test_weakening_drops_what_is_not_enforced_and_nothing_else():
    schema = {"type": "array", "uniqueItems": True, "items": {"not": {"type": "null"}, "maxLength": 3}}
    assert weakened(schema, "llguidance") == {"type": "array", "items": {"maxLength": 3}}


def test_unknown_formats_and_empty_conditions_bind_nothing():
    schema = {"format": "color", "uniqueItems": False, "minItems": 0, "properties": {"a": {"title": "t"}}}
    assert strip(schema) == {"properties": {"a": {}}}
    assert strip({"format": "date"}) == {"format": "date"}
