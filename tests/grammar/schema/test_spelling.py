"""A strict schema with a misspelled keyword is refused; other unknown names are annotations."""

import json
from typing import Any

import pytest
from byte_bpe import byte_level_vocabulary

from personae.errors import GrammarError
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.schema.document import parse_schema
from personae.grammar.schema.spelling import check_spelling, foreign
from personae.grammar.spec import GrammarSpec

MISSPELLINGS: list[tuple[dict[str, Any], str, str]] = [
    ({"maxlength": 3}, "#/maxlength", "maxLength"),
    ({"propertees": {}}, "#/propertees", "properties"),
    ({"properties": {"a": {"emum": [1]}}}, "#/properties/a/emum", "enum"),
    ({"items": {"additonalProperties": False}}, "#/items/additonalProperties", "additionalProperties"),
    ({"anyOf": [{"requried": ["a"]}]}, "#/anyOf/0/requried", "required"),
    ({"type": "string", "format": "URI"}, "#/format", "uri"),
    ({"type": "string", "format": "host-name"}, "#/format", "hostname"),
]


@pytest.mark.parametrize(("schema", "place", "meant"), MISSPELLINGS, ids=lambda value: str(value)[:30])
def test_a_misspelling_is_refused_with_its_place_and_what_was_meant(
    schema: dict[str, Any], place: str, meant: str
) -> None:
    with pytest.raises(GrammarError, match="did you mean") as refused:
        check_spelling(parse_schema(json.dumps(schema)))
    assert f" at {place} is unknown" in refused.value.message
    assert f"did you mean {meant!r}?" in refused.value.message


@pytest.mark.parametrize(
    "schema",
    [
        {"title": "a", "default": 1, "examples": [1], "deprecated": True, "readOnly": True, "nullable": True},
        {"x-type": "a", "_format": "b", "@type": "c", "id": "d", "note": "e", "ip": "f"},
        {"$id": "https://a", "$anchor": "a", "$defs": {"types": {}}, "definitions": {"formt": {}}},
        {"properties": {"tpye": {}, "maxlength": {}}, "enum": [{"requried": 1}], "format": "int32"},
        {"propertyOrdering": ["a"], "discriminator": {}, "format": "color"},
        {"items": {"format": "url"}},
        {"format": "ulid", "multiple": True, "$extends": "a", "properties": {"a": {"format": "cuid2"}}},
    ],
    ids=["annotations", "own", "names", "values", "others", "a format in use", "other tools'"],
)
def test_names_that_are_no_misspelling_are_ignored(schema: dict[str, Any]) -> None:
    check_spelling(parse_schema(json.dumps(schema)))


def test_a_schema_that_is_not_strict_is_bound_without_it() -> None:
    compiler = GrammarCompiler(byte_level_vocabulary(), sandboxed=False)
    source = json.dumps({"type": "string", "maxlength": 3})
    with pytest.raises(GrammarError, match="'maxlength' at #/maxlength"):
        compiler.compile(GrammarSpec("json_schema", source))
    assert compiler.compile(GrammarSpec("json_schema", source, strict=False)).shortest


@pytest.mark.parametrize(
    "format",
    [
        *("ulid", "nanoid", "jwt", "url", "base64", "int32", "float", "decimal", "byte", "password"),
        *("json-string", "uuid4", "datetime", "ipvanyaddress", "quux"),
    ],
)
def test_each_format_that_binds_nothing_is_told_by_its_place(format: str) -> None:
    assert foreign({"properties": {"v": {"type": "string", "format": format}}}) == ["#/properties/v/format"]


@pytest.mark.parametrize(
    "keyword", ["multiple", "$extends", "nullable", "instanceOf", "example", "formatMinimum", "quux"]
)
def test_each_keyword_that_binds_nothing_is_told_by_its_place(keyword: str) -> None:
    assert foreign({"items": {keyword: 1}}) == [f"#/items/{keyword.replace('~', '~0').replace('/', '~1')}"]


def test_annotations_and_the_writers_own_names_are_not_told() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://a",
        "$defs": {"quux": {"title": "a", "default": 1, "examples": [1], "readOnly": True}},
        "properties": {"quux": {"format": "date", "contentEncoding": "base64", "$comment": "b"}},
        "x-order": 1,
        "_own": 2,
        "@type": "c",
        "enum": [{"quux": 1}],
    }
    assert foreign(schema) == []


def test_all_misspellings_are_named_at_once() -> None:
    with pytest.raises(GrammarError) as refused:
        check_spelling({"maxlength": 3, "items": {"requried": ["a"], "format": "URI"}})
    for place in ("#/maxlength", "#/items/requried", "#/items/format"):
        assert f" at {place} is unknown" in refused.value.message
