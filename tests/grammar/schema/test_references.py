"""References by identifiers, anchors and dynamic scope are resolved within the document."""

import json
from typing import Any

import pytest
from jsonschema.validators import validator_for

from personae.errors import GrammarError
from personae.evals.suites.draft_suite import bundled, read_drafts
from personae.evals.suites.maskbench import DATA, byte_vocabulary, run
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.schema.prepare import without_ignored
from personae.grammar.schema.references import missing, resolved
from personae.grammar.schema.walk import subschemas
from personae.grammar.spec import GrammarSpec

COMPILER = GrammarCompiler(byte_vocabulary(), sandboxed=False)
D2020, D2019, D7 = (
    "https://json-schema.org/draft/2020-12/schema",
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema#",
)
LIST = {
    "$id": "https://example.com/list",
    "type": "array",
    "items": {"$dynamicRef": "#item"},
    "$defs": {"any": {"$dynamicAnchor": "item"}},
}


def list_of(name: str, item: dict[str, Any]) -> dict[str, Any]:
    return {
        "$id": f"https://example.com/{name}",
        "$ref": "list",
        "$defs": {"i": {"$dynamicAnchor": "item", **item}, "list": LIST},
    }


CASES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "a list whose items its user defines": (
        {"$schema": D2020, **list_of("numbers", {"type": "integer"})},
        [[1, 2], ["a"], [], [[1]]],
    ),
    "two users of one list": (
        {
            "$schema": D2020,
            "$id": "https://example.com/both",
            "type": "object",
            "properties": {"n": {"$ref": "numbers"}, "s": {"$ref": "strings"}},
            "required": ["n", "s"],
            "additionalProperties": False,
            "$defs": {
                "numbers": list_of("numbers", {"type": "integer"})
                | {"$defs": {"i": {"$dynamicAnchor": "item", "type": "integer"}}},
                "strings": list_of("strings", {"type": "string"})
                | {"$defs": {"i": {"$dynamicAnchor": "item", "type": "string"}}},
                "list": LIST,
            },
        },
        [{"n": [1], "s": ["a"]}, {"n": ["a"], "s": []}, {"n": [], "s": [1]}],
    ),
    "an anchor": (
        {"$schema": D2020, "$ref": "#here", "$defs": {"a": {"$anchor": "here", "type": "boolean"}}},
        [True, 1],
    ),
    "a relative identifier": (
        {
            "$schema": D2020,
            "$id": "https://example.com/a/b",
            "type": "array",
            "items": {"$ref": "c#/$defs/d"},
            "$defs": {"x": {"$id": "c", "$defs": {"d": {"$ref": "#/$defs/e"}, "e": {"type": "null"}}}},
        },
        [[None], [1]],
    ),
    "a URN": (
        {
            "$schema": D2020,
            "$id": "urn:uuid:deadbeef-1234-00ff-ff00-4321feebdaed",
            "$ref": "#/$defs/bar",
            "$defs": {"bar": {"type": "string"}},
            "type": "string",
        },
        ["a", 1],
    ),
    "an anchor of draft 7": (
        {
            "$schema": D7,
            "items": {"$ref": "#x"},
            "type": "array",
            "definitions": {"A": {"$id": "#x", "type": "integer"}},
        },
        [[1], ["a"]],
    ),
    "a tree whose leaves its user defines": (
        {
            "$schema": D2019,
            "$id": "https://example.com/of-integers",
            "$recursiveAnchor": True,
            "anyOf": [{"type": "integer"}, {"$ref": "tree"}],
            "$defs": {
                "tree": {
                    "$id": "tree",
                    "$recursiveAnchor": True,
                    "type": "array",
                    "items": {"$recursiveRef": "#"},
                }
            },
        },
        [1, [], [1, [2]], ["a"], [[None]]],
    ),
}


def accepted(schema: Any, instance: Any) -> bool:
    matcher = COMPILER.compile(GrammarSpec("json_schema", json.dumps(schema))).matcher()
    text = json.dumps(instance).encode()
    return matcher.feed(text) == len(text) and matcher.accept(256)


@pytest.mark.parametrize("name", CASES)
def test_a_reference_leads_where_jsonschema_says(name: str) -> None:
    schema, instances = CASES[name]
    judge = validator_for(schema)(schema)
    rewritten = resolved(schema)
    again = validator_for(schema)(rewritten)
    for instance in instances:
        valid = judge.is_valid(instance)
        assert again.is_valid(instance) is valid
        assert accepted(schema, instance) is valid
    assert {judge.is_valid(one) for one in instances} == {True, False}


@pytest.mark.parametrize("name", CASES)
def test_afterwards_all_references_are_pointers_from_the_root(name: str) -> None:
    for node, path in subschemas(resolved(CASES[name][0])):
        assert node.get("$ref", "#").startswith("#")
        assert not {"$dynamicRef", "$recursiveRef", "$anchor"} & node.keys()
        assert not path or "$id" not in node


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}},
        {"$id": "https://example.com/x", "$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}},
        {"type": "object", "properties": {"$id": {"type": "string"}}},
    ],
)
def test_a_document_that_needs_nothing_stays_as_it_is(schema: dict[str, Any]) -> None:
    assert resolved(schema) is schema


def test_readers_differ_so_it_is_refused() -> None:
    """A resource without `$recursiveAnchor` lies between two that have one."""
    schema = {
        "$schema": D2019,
        "$id": "https://example.com/outer",
        "$recursiveAnchor": True,
        "$ref": "middle",
        "$defs": {
            "middle": {"$id": "middle", "type": "array", "items": {"$ref": "inner"}},
            "inner": {
                "$id": "inner",
                "$recursiveAnchor": True,
                "anyOf": [
                    {"type": "integer"},
                    {"type": "object", "additionalProperties": {"$recursiveRef": "#"}},
                ],
            },
        },
    }
    with pytest.raises(GrammarError, match="recursiveRef"):
        COMPILER.compile_here(GrammarSpec("json_schema", json.dumps(schema)))


def test_a_document_elsewhere_is_never_fetched_but_may_be_embedded() -> None:
    schema = {"$schema": D2020, "type": "array", "items": {"$ref": "http://localhost:1234/i.json"}}
    with pytest.raises(GrammarError, match="malformed"):
        COMPILER.compile_here(GrammarSpec("json_schema", json.dumps(schema)))
    assert missing(schema) == {"http://localhost:1234/i.json"}
    whole = bundled(schema, {"http://localhost:1234/i.json": {"type": "integer"}})
    assert accepted(whole, [1])
    assert not accepted(whole, ["a"])


def test_a_refusal_names_the_place_that_the_caller_wrote() -> None:
    schema = {
        "$schema": D2020,
        "type": "array",
        "items": {"$ref": "#x"},
        "$defs": {"here": {"$anchor": "x", "type": "number", "not": {"multipleOf": 0.7}}},
    }
    with pytest.raises(GrammarError, match="'not' at #/\\$defs/here/not"):
        COMPILER.compile_here(GrammarSpec("json_schema", json.dumps(schema)))


@pytest.mark.skipif(not (DATA / "json-schema-test-suite").is_dir(), reason="the shared data are not here")
def test_of_the_official_suite_nothing_invalid_is_accepted() -> None:
    for draft, cases in read_drafts(DATA / "json-schema-test-suite"):
        chosen = [
            case
            for case in cases
            if case.file in ("dynamicRef", "ref", "refRemote", "anchor", "defs", "definitions")
        ]
        for case in chosen:
            if isinstance(case.schema, dict):
                rewritten = resolved(without_ignored(case.schema))
                judge = validator_for(rewritten)(rewritten)
                assert all(judge.is_valid(instance) is valid for _, instance, valid in case.instances), (
                    case.name
                )
        report = run(chosen, COMPILER, lambda text: list(text.encode()), strict=True)
        assert not report.false_accepts, draft
        assert not report.false_rejects, draft
        assert report.compiled >= len(chosen) - 7, (draft, report.refusals)
