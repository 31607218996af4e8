"""Branches of oneOf that overlap are kept apart: whatever is taken then is taken by the schema."""

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from json_schemas import VALUES, schemas

from personae.evals.suites.maskbench import byte_vocabulary
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.schema.complements import without_conditions
from personae.grammar.schema.document import Schema
from personae.grammar.schema.prepare import ANALYSIS_ERRORS
from personae.grammar.spec import GrammarSpec

COMPILER = GrammarCompiler(byte_vocabulary(), sandboxed=False)
NAMES = ("a", "b", "kind")
MEMBER = st.sampled_from(
    [{"type": "string"}, {"type": "integer"}, {"const": "x"}, {"enum": ["x", "y"]}, {"const": "z"}, {}]
)
BRANCH = st.fixed_dictionaries(
    {"properties": st.dictionaries(st.sampled_from(NAMES), MEMBER)},
    optional={
        "required": st.lists(st.sampled_from(NAMES), unique=True),
        "type": st.sampled_from(["object", ["object", "string"], "string"]),
        "additionalProperties": st.just(False),
    },
)
OBJECTS = [
    dict(zip(NAMES, values, strict=True)) for values in product((None, 1, "x", "y", "z"), repeat=len(NAMES))
]
OBJECTS = [{name: value for name, value in one.items() if value is not None} for one in OBJECTS]


def kept_apart(schema: Schema) -> Schema | None:
    try:
        return without_conditions(schema, by_tags=True)
    except ANALYSIS_ERRORS:
        return None


def accepting(schema: Any) -> Callable[[Any], bool]:
    """Whether an instance is valid."""
    judge = jsonschema.Draft202012Validator(schema)
    return lambda instance: bool(judge.is_valid(instance))


@settings(max_examples=300, deadline=None)
@given(st.lists(BRANCH, min_size=2, max_size=4), st.booleans())
def test_what_is_kept_apart_takes_nothing_that_the_schema_does_not(branches, referred):
    schema: dict[str, Any] = {"oneOf": branches}
    if referred:
        definitions = {f"b{place}": branch for place, branch in enumerate(branches)}
        schema = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in definitions], "$defs": definitions}
    found = kept_apart(schema)
    if found is not None:
        assert "oneOf" not in json.dumps(found)
        jsonschema.Draft202012Validator.check_schema(found)
        valid, taken = accepting(schema), accepting(found)
        for instance in (*OBJECTS, "x", 3, None):
            assert valid(instance) or not taken(instance)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(schemas(), st.lists(VALUES, min_size=3, max_size=6))
def test_any_schema_that_is_kept_apart_takes_a_part_of_what_it_took(schema, instances):
    found = kept_apart(schema)
    if found is not None:
        valid, taken = accepting(schema), accepting(found)
        assert all(valid(instance) or not taken(instance) for instance in instances)


def pet(kind: str, name: str, value: str) -> dict[str, Any]:
    """As pydantic writes a member of a union whose tag has a default."""
    properties = {"kind": {"const": kind, "default": kind, "type": "string"}, name: {"type": value}}
    return {"type": "object", "properties": properties, "required": [name]}


PETS = {
    "cat": pet("cat", "lives", "integer"),
    "dog": pet("dog", "bark", "string"),
    "cow": pet("cow", "milk", "number"),
}
FAMILY = {
    "kind": {"const": "cat", "default": "cat"},
    "kids": {"type": "array", "items": {"$ref": "#/$defs/any"}},
}
RECURSIVE = {
    "$defs": {
        **PETS,
        "cat": {"type": "object", "properties": FAMILY},
        "any": {"oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in PETS]},
    },
    "$ref": "#/$defs/any",
}
ONE_OF_THREE = {
    "type": "object",
    "properties": {name: {"type": "integer"} for name in ("min", "max", "exact")},
    "oneOf": [{"required": [name]} for name in ("min", "max", "exact")],
}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (
            {"oneOf": list(PETS.values())},
            [{"kind": "cat", "lives": 1}, {"kind": "dog", "bark": "w"}],
            [{"kind": "cat"}, {"lives": 1, "bark": "x"}, {"kind": "cat", "bark": "x"}, {}, {"kind": "pig"}],
        ),
        (
            RECURSIVE,
            [{"kind": "cat", "kids": [{"kind": "dog", "bark": "w"}, {"kind": "cat"}]}],
            [{"kind": "cat", "kids": [{"kind": "dog"}]}, {"kind": "cow"}, {}],
        ),
        (ONE_OF_THREE, [{"min": 1}, {"exact": 1}], [{}, {"min": 1, "max": 2}, {"min": "1"}]),
        (
            {"oneOf": [{"required": [name]} for name in ("a", "b", "c")]},
            [{"a": 1}, {"c": 1, "d": 2}],
            [{}, {"a": 1, "b": 2}, "text", 3],
        ),
    ],
)
def test_unions_of_objects_are_enforced(schema, valid, invalid):
    grammar = COMPILER.compile(GrammarSpec("json_schema", json.dumps(schema)))

    def taken(value: Any) -> bool:
        matcher = grammar.matcher()
        return all(
            matcher.accept(one) for one in json.dumps(value, separators=(",", ":")).encode()
        ) and matcher.accept(256)

    assert list(map(taken, valid)) == [True] * len(valid)
    assert not any(map(taken, invalid))


def test_a_name_that_a_branch_requires_already_is_not_named_twice() -> None:
    closed = {"properties": {}, "required": [], "additionalProperties": False}
    found = kept_apart({"oneOf": [closed, {"properties": {"a": {"type": "string"}}, "required": ["a"]}]})
    jsonschema.Draft202012Validator.check_schema(found)  # names are unique
