import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from json_schemas import INNER, NAMES, VALUES, schemas

from personae.grammar.schema.disjoint import without_disjoint_one_of
from personae.grammar.schema.walk import subschemas


def accepting(schema):
    """Whether an instance is valid."""
    return jsonschema_rs.Draft202012Validator(schema).is_valid


def open_choices(schema):
    return sum("oneOf" in one for one, _ in subschemas(schema))


DEFINITIONS = {
    "name": {"type": "string"},
    "list": {"type": "array", "items": {"$ref": "#/$defs/list"}},
    "person": {"type": "object", "properties": {"kind": {"const": "person"}}, "required": ["kind"]},
    "either": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/name"}]},
}

DISJOINT = [
    [{"type": "string"}, {"type": "null"}],
    [{"$ref": "#/$defs/name"}, {"$ref": "#/$defs/list"}, {"$ref": "#/$defs/person"}],
    [{"type": ["string", "null"]}, {"type": "number"}, {"const": True}],
    [{"enum": ["a", "b"]}, {"enum": ["c", 1]}, {"const": False}],
    [{"$ref": "#/$defs/person"}, {"type": "object", "properties": {"kind": {"enum": ["dog", "cat"]}}}],
    [{"$ref": "#/$defs/person"}, {"type": "object", "additionalProperties": False}],
    [{"allOf": [{"$ref": "#/$defs/person"}]}, {"type": "object", "properties": {"kind": False}}],
    [{"$ref": "#/$defs/either"}, {"type": "integer"}],
    [{"type": "integer"}, {"const": 1.5}],
    [{"$ref": "#/$defs/person"}, False],
]
OVERLAPPING = [
    [{"type": "integer"}, {"type": "number"}],
    [{"const": 1}, {"const": 1.0}],
    [{"type": "string"}, {}],
    [{"$ref": "#/$defs/either"}, {"$ref": "#/$defs/name"}],
    [{"required": ["a"]}, {"required": ["b"]}],
    [{"properties": {"kind": {"const": "a"}}}, {"properties": {"kind": {"const": "b"}}}],
    [
        {"$ref": "#/$defs/person"},
        {"type": "object", "additionalProperties": False, "patternProperties": {"k": {}}},
    ],
    [{"$ref": "elsewhere"}, {"type": "object"}],
]


@pytest.mark.parametrize("branches", DISJOINT)
def test_branches_that_exclude_one_another_are_alternatives(branches):
    assert open_choices(without_disjoint_one_of({"$defs": DEFINITIONS, "oneOf": branches})) == 0


@pytest.mark.parametrize("branches", OVERLAPPING)
def test_branches_that_may_overlap_are_left_alone(branches):
    schema = {"$defs": DEFINITIONS, "oneOf": branches}
    assert without_disjoint_one_of(schema) == schema


def test_what_stands_beside_them_counts():
    branches = [{"required": ["a"], "properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": 2}}}]
    assert open_choices(without_disjoint_one_of({"oneOf": branches})) == 1
    settled = without_disjoint_one_of({"type": "object", "oneOf": branches, "anyOf": [{"required": ["b"]}]})
    assert settled == {
        "type": "object",
        "anyOf": [{"required": ["b"]}],
        "allOf": [{"anyOf": branches}],
    }


def test_references_that_a_base_changes_are_not_followed():
    schema = {
        "$defs": {"x": {"$id": "other", "type": "null"}},
        "oneOf": [{"$ref": "#/$defs/x"}, {"const": 1}],
    }
    assert without_disjoint_one_of(schema) is schema


def test_many_branches_are_compared_within_bounds():
    branches = [{"anyOf": [{"const": [n, m]} for m in range(20)]} for n in range(400)]
    assert open_choices(without_disjoint_one_of({"oneOf": branches})) == 1


OBJECTS = st.builds(
    lambda listed, required, closed: {
        "type": "object",
        "properties": listed,
        "required": required,
        **({"additionalProperties": False} if closed else {}),
    },
    st.dictionaries(NAMES, st.one_of(INNER, st.builds(lambda value: {"const": value}, VALUES)), max_size=2),
    st.lists(NAMES, max_size=2, unique=True),
    st.booleans(),
)
BRANCH = st.one_of(
    OBJECTS,
    INNER,
    st.just({"$ref": "#/$defs/other"}),
    st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=2)),
    st.builds(lambda inner: {"allOf": inner}, st.lists(OBJECTS, min_size=1, max_size=2)),
)


@settings(max_examples=500, suppress_health_check=list(HealthCheck))
@given(schemas(), st.lists(BRANCH, min_size=2, max_size=3), st.lists(VALUES, min_size=4, max_size=8))
def test_nothing_changes_for_any_instance(schema, branches, instances):
    schema = {**schema, "oneOf": branches}
    rewritten = without_disjoint_one_of(schema)
    before, after = accepting(schema), accepting(rewritten)
    assert [after(instance) for instance in instances] == [before(instance) for instance in instances]
