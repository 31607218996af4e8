"""What of a schema is put to a backend: what its draft knows, and what can be bound of the rest."""

import json
from typing import Any

import jsonschema_rs
import pytest
from worst import text_vocabulary

from personae.errors import GrammarError
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.schema.document import validator
from personae.grammar.schema.prepare import without_ignored
from personae.grammar.spec import GrammarSpec

VOCABULARY = text_vocabulary()
COMPILER = GrammarCompiler(VOCABULARY, sandboxed=False)

DRAFTS = {
    "http://json-schema.org/draft-04/schema#": jsonschema_rs.Draft4Validator,
    "http://json-schema.org/draft-06/schema#": jsonschema_rs.Draft6Validator,
    "http://json-schema.org/draft-07/schema#": jsonschema_rs.Draft7Validator,
    "https://json-schema.org/draft/2019-09/schema": jsonschema_rs.Draft201909Validator,
    "https://json-schema.org/draft/2020-12/schema": jsonschema_rs.Draft202012Validator,
}
# A schema, and what it forbids where its draft has the keyword.
FORBIDDING: dict[str, tuple[dict[str, Any], Any]] = {
    "const": ({"const": 1}, 2),
    "contains": ({"contains": {"const": 1}}, []),
    "propertyNames": ({"propertyNames": False}, {"a": 1}),
    "then": ({"if": True, "then": False}, 1),
    "else": ({"if": False, "else": False}, 1),
    "dependentRequired": ({"dependentRequired": {"a": ["b"]}}, {"a": 1}),
    "dependentSchemas": ({"dependentSchemas": {"a": False}}, {"a": 1}),
    "maxContains": ({"contains": True, "maxContains": 1}, [1, 2]),
    "unevaluatedProperties": ({"unevaluatedProperties": False}, {"a": 1}),
    "unevaluatedItems": ({"unevaluatedItems": False}, [1]),
    "prefixItems": ({"prefixItems": [False]}, [1]),
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("keyword", FORBIDDING)
def test_a_keyword_says_something_from_the_draft_that_brought_it_on(draft: str, keyword: str) -> None:
    schema, forbidden = FORBIDDING[keyword]
    document: dict[str, Any] = {"$schema": draft, "properties": {"x": schema}}
    said = not DRAFTS[draft](document).is_valid({"x": forbidden})
    kept: Any = without_ignored(document)
    assert (keyword in kept["properties"]["x"]) is said
    assert validator(kept).is_valid({"x": forbidden}) is not said


def accepts(schema: Any, instance: Any, *, strict: bool) -> bool:
    grammar = COMPILER.compile(GrammarSpec("json_schema", json.dumps(schema), strict))
    text = [*json.dumps(instance).encode(), VOCABULARY.stop_ids[0]]
    return grammar.matcher().feed(text) == len(text)


def test_a_const_of_draft_4_binds_nothing() -> None:
    schema = {"type": "array", "items": {"const": "a"}}
    assert not accepts(schema, ["b"], strict=True)
    assert accepts(schema | {"$schema": "http://json-schema.org/draft-04/schema#"}, ["b"], strict=True)


ORDER = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["id", "count"],
    "additionalProperties": False,
}


def with_id(schema: dict[str, Any]) -> dict[str, Any]:
    return ORDER | {"properties": {"id": schema, "count": {"type": "integer"}}}


@pytest.mark.parametrize(
    "schema",
    [
        with_id({"type": "string", "pattern": "^(a|b)\\1$"}),
        with_id({"type": "string", "patternProperties": {"^a": True, "b$": False}}),
        ORDER | {"properties": {"id": {"type": "string"}, "count": {"type": "integer", "minimum": -(2**63)}}},
        with_id({"$ref": "#/texts/any"}) | {"texts": {"any": {"type": "string", "pattern": "(a)\\1"}}},
    ],
    ids=["backreference", "patterns that overlap", "far bound", "reference to anywhere"],
)
def test_where_a_part_cannot_be_read_the_rest_still_binds_what_is_not_strict(schema: dict[str, Any]) -> None:
    assert accepts(schema, {"id": "ab", "count": 3}, strict=False)
    for wrong in ({}, {"id": 3, "count": 3}, {"id": "ab", "count": "three"}, {"type": "object"}, []):
        assert not accepts(schema, wrong, strict=False)


def test_what_cannot_be_read_is_refused_where_it_is_strict() -> None:
    with pytest.raises(GrammarError, match="'pattern' at #/properties/id/pattern cannot be enforced"):
        COMPILER.compile_here(
            GrammarSpec("json_schema", json.dumps(with_id({"type": "string", "pattern": "^(a|b)\\1$"})))
        )


@pytest.mark.parametrize(
    ("schema", "places"),
    [
        ({"type": "integer", "minimum": 5, "maximum": 3}, ("minimum", "maximum")),
        ({"type": "number", "exclusiveMinimum": 5, "maximum": 5}, ("exclusiveMinimum", "maximum")),
        ({"type": "string", "minLength": 5, "maxLength": 3}, ("minLength", "maxLength")),
        ({"type": "array", "minItems": 5, "maxItems": 3}, ("minItems", "maxItems")),
        ({"type": "object", "minProperties": 5, "maxProperties": 3}, ("minProperties", "maxProperties")),
    ],
)
def test_bounds_that_nothing_is_between_are_named_where_they_stand(
    schema: dict[str, Any], places: tuple[str, str]
) -> None:
    one, other = (f"#/properties/id/{place}" for place in places)
    with pytest.raises(GrammarError, match=f"both {places[0]!r} at {one} and {places[1]!r} at {other}"):
        accepts(with_id(schema), {}, strict=True)


def test_equal_bounds_and_those_of_draft_4_are_no_contradiction() -> None:
    assert accepts(
        with_id({"type": "integer", "minimum": 5, "maximum": 5}), {"id": 5, "count": 3}, strict=True
    )
    of_draft_4 = {"type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 3}
    document = with_id(of_draft_4) | {"$schema": "http://json-schema.org/draft-04/schema#"}
    with pytest.raises(GrammarError) as refused:
        accepts(document, {}, strict=True)
    assert "No value satisfies" not in refused.value.message
