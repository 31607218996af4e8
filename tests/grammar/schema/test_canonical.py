import jsonschema
import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from json_schemas import VALUES, schemas

import personae.grammar.schema.rewritten as rewritten_module
from personae.evals.hostile import laughs
from personae.grammar.schema.canonical import TooLarge, canonicalise
from personae.grammar.schema.gate import strip, unenforced
from personae.grammar.schema.rewritten import rewritten
from personae.grammar.schema.walk import subschemas


def accepts(schema, instance):
    return jsonschema.Draft202012Validator(schema).is_valid(instance)


@settings(max_examples=400, suppress_health_check=list(HealthCheck))
@given(schemas(), st.lists(VALUES, min_size=3, max_size=6))
def test_a_schema_and_its_canonical_form_accept_the_same(schema, instances):
    try:
        rewritten = canonicalise(schema)
    except jsonschema_rs.canonical.CanonicalizationError:
        return
    for instance in instances:
        assert accepts(rewritten, instance) == accepts(schema, instance)


@pytest.mark.parametrize("names", [{"pattern": "^a"}, {"anyOf": [{"pattern": "^a"}, {"enum": ["b", "c"]}]}])
@pytest.mark.parametrize("listed", [{}, {"b": {"type": "integer"}}])
def test_patterns_of_names_hold_beside_patterns_of_properties(names, listed):
    schema = {"type": "object", "propertyNames": names, "patternProperties": {"b$": {"type": "integer"}}}
    schema |= {"properties": listed} if listed else {}
    rewritten = canonicalise(schema)
    for name in ("a", "ab", "b", "c", "xb"):
        for value in (1, "text"):
            assert accepts(rewritten, {name: value}) == accepts(schema, {name: value}), (name, value)


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(schemas(), VALUES)
def test_stripping_changes_nothing(schema, instance):
    annotated = {"title": "t", "x-guidance": {"lenient": True}, "format": "color", **schema}
    assert accepts(strip(annotated), instance) == accepts(schema, instance)
    assert "x-guidance" not in strip(annotated)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"$ref": "#/$defs/x"}, {"properties": {"q": {"type": "string"}}}]},
        {"$ref": "#/$defs/x", "required": ["p"]},
        {"minimum": 3, "minLength": 2},
        {
            "type": "object",
            "if": {"required": ["a"]},
            "then": {"required": ["b"]},
            "else": {"required": ["c"]},
        },
        {"type": "object", "dependentRequired": {"a": ["b"]}, "dependentSchemas": {"b": {"required": ["c"]}}},
        {"oneOf": [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}]},
        {"oneOf": [{"type": "integer", "maximum": 7}, {"type": "integer", "minimum": 5}]},
        {"type": "string", "not": {"enum": ["a", "b"]}},
        {"type": "integer", "not": {"const": 3}},
        {"type": ["string", "integer"], "not": {"type": "string"}},
        {"type": "string", "not": {"pattern": "[^a-z]"}},
        {"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": {"type": "integer"}},
        {"type": "object", "propertyNames": {"maxLength": 3}},
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
        {"properties": {"a": True}, "allOf": [{"properties": {"b": True}}], "unevaluatedProperties": False},
        {"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": ["b"]}},
        {"type": "integer", "minimum": -(2**63), "exclusiveMaximum": 2**63 - 1},
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"$ref": "#/$defs/x"}},
            "minProperties": 1,
        },
    ],
    ids=lambda schema: "+".join(schema),
)
def test_rewriting_leaves_nothing_that_llguidance_would_pass_over(schema):
    document = {**schema, "$defs": {"x": {"type": "object", "properties": {"q": {"minLength": 2}}}}}
    assert list(unenforced(strip(canonicalise(document)), "llguidance")) == []


def test_properties_keep_the_order_in_which_they_were_written():
    document = {
        "type": "object",
        "properties": {
            "zeta": {"type": "object", "properties": {"y": {}, "x": {"type": "null"}}},
            "alpha": {},
        },
        "additionalProperties": False,
        "allOf": [{"properties": {"mid": {"type": "string"}, "alpha": {"type": "string"}}}],
        "not": {"required": ["nothing"]},
    }
    orders = [list(one["properties"]) for one, _ in subschemas(canonicalise(document)) if "properties" in one]
    assert ["zeta", "alpha"] in orders


@pytest.mark.parametrize("schema", [True, False])
def test_a_boolean_is_its_own_canonical_form(schema):
    assert canonicalise(schema) is schema


def test_bounds_that_no_double_holds_move_inwards():
    schema = canonicalise({"type": "integer", "minimum": -(2**63) - 1, "maximum": 2**63 - 1})
    assert schema["maximum"] <= 2**63 - 1 == int(schema["maximum"] + 1023)
    assert schema["minimum"] >= -(2**63) - 1


@pytest.mark.parametrize("keyword", ["$dynamicRef", "$recursiveRef"])
def test_a_document_with_dynamic_references_has_no_canonical_form(keyword):
    with pytest.raises(ValueError, match="dynamic"):
        canonicalise({"items": {keyword: "#"}})


def test_unevaluated_properties_behind_a_reference_see_only_what_is_beside_them():
    schema = {
        "$ref": "#/$defs/closed",
        "properties": {"a": {"type": "string"}},
        "$defs": {"closed": {"unevaluatedProperties": False}},
    }
    assert not accepts(schema, {"a": "x"})
    assert not accepts(canonicalise(schema), {"a": "x"})


def test_what_stands_beside_a_reference_and_in_it_both_hold():
    schema = {
        "$ref": "#/$defs/one",
        "maxProperties": 0,
        "$defs": {"one": {"type": "object", "maxProperties": 1}},
    }
    assert canonicalise(schema)["const"] == {}
    draft7 = {**schema, "$schema": "http://json-schema.org/draft-07/schema#", "definitions": schema["$defs"]}
    draft7["$ref"] = "#/definitions/one"
    assert canonicalise(draft7)["maxProperties"] == 1


def test_references_that_multiply_when_they_are_inlined_have_no_canonical_form():
    assert canonicalise(laughs(4))
    assert canonicalise({"items": {"$ref": "#"}, "minItems": 1})
    with pytest.raises(ValueError, match="too large"):
        canonicalise(laughs(40))


def test_conditions_that_multiply_have_no_canonical_form_and_none_is_made_of_them_again(monkeypatch):
    conditions = [
        {"if": {"properties": {f"a{one}": {"const": 1}}}, "then": {"required": [f"b{one}"]}}
        for one in range(11)
    ]
    schema = {"type": "object", "allOf": conditions}
    with pytest.raises(TooLarge):
        canonicalise(schema)
    asked = []
    monkeypatch.setattr(rewritten_module, "canonicalise", lambda one: asked.append(one) or canonicalise(one))
    assert len(list(rewritten(schema))) > 1
    assert asked == [schema]
