"""A refusal names every keyword that has to go, where it stands: without them the schema is accepted."""

import json
import re
from typing import Any

import pytest
from worst import text_vocabulary

from personae.errors import GrammarError
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.schema.culprits import explained, without_trials
from personae.grammar.schema.prepare import without
from personae.grammar.spec import GrammarSpec

COMPILER = GrammarCompiler(text_vocabulary(), sandboxed=False)
UNIQUE = {"type": "array", "items": {"type": "object"}, "uniqueItems": True}
TWICE = {"type": "string", "pattern": r"(a)\1"}
OVERLAPPING = {"oneOf": [{"type": "integer", "multipleOf": step} for step in (3, 7)]}


def named(schema: Any) -> list[str]:
    """The pointers of the refusal."""
    with pytest.raises(GrammarError) as refused:
        COMPILER.compile_here(GrammarSpec("json_schema", json.dumps(schema)))
    return [found.rstrip(".,;") for found in re.findall(r" at (#\S*)", refused.value.message)]


@pytest.mark.parametrize(
    ("properties", "places"),
    [
        ({"x": UNIQUE, "y": UNIQUE}, ["x/uniqueItems", "y/uniqueItems"]),
        ({"x": UNIQUE, "y": TWICE, "z": {"type": "string"}}, ["x/uniqueItems", "y/pattern"]),
        ({"x": OVERLAPPING, "y": UNIQUE}, ["x/oneOf", "y/uniqueItems"]),
        ({"x": {"items": {"type": "array", "items": TWICE}}}, ["x/items/items/pattern"]),
        ({"x": {"prefixItems": [{"type": "null"}], "contains": {"const": 1}}}, ["x/contains"]),
        (
            {"x": {"oneOf": [{"type": "string"}, UNIQUE]}},
            ["x/oneOf/1/uniqueItems"],
        ),
    ],
    ids=["twice", "keyword and pattern", "oneOf and keyword", "deep", "contains", "within oneOf"],
)
def test_all_keywords_are_named_and_the_rest_is_accepted(
    properties: dict[str, Any], places: list[str]
) -> None:
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    assert sorted(named(schema)) == sorted(f"#/properties/{place}" for place in places)
    paths: set[tuple[str | int, ...]] = {
        ("properties", *(int(step) if step.isdigit() else step for step in place.split("/")))
        for place in places
    }
    assert COMPILER.compile(GrammarSpec("json_schema", json.dumps(without(paths, schema)))).shortest


def test_misspellings_and_keywords_are_named_together() -> None:
    schema = {
        "type": "object",
        "properties": {"x": UNIQUE, "y": {"type": "string", "maxlength": 3}, "z": {"format": "URI"}},
    }
    assert sorted(named(schema)) == [
        "#/properties/x/uniqueItems",
        "#/properties/y/maxlength",
        "#/properties/z/format",
    ]


def test_a_refusal_without_a_culprit_names_no_option_of_a_library() -> None:
    with pytest.raises(GrammarError) as refused:
        COMPILER.compile_here(GrammarSpec("json_schema", json.dumps(OVERLAPPING)))
    assert "#/oneOf" in refused.value.message
    assert "coerce_one_of" not in refused.value.message


def test_a_schema_that_has_taken_long_is_refused_without_further_trials() -> None:
    tried: list[Any] = []
    document = {"type": "string", "pattern": "x"}
    error = without_trials(document, None, spent=1.5)
    assert "cannot be enforced" in error.message
    assert explained(document, error, lambda one: tried.append(one) or True) is error
    assert tried == []
    early = without_trials(document, None)
    assert "'pattern'" in explained(document, early, lambda one: "pattern" not in one).message


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "const": "a\x7fb"},
        {"type": "string", "enum": ["a\x7fb", "c"]},
        {"type": "string", "pattern": "^\\x7f$"},
        {"type": "object", "properties": {"a\x7f": {}}, "required": ["a\x7f"], "additionalProperties": False},
    ],
)
def test_a_refusal_says_that_no_answer_has_a_control_character(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError) as refused:
        COMPILER.compile_here(GrammarSpec("json_schema", json.dumps(schema)))
    assert "No bound answer has the control character U+007F." in refused.value.message
