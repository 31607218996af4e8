"""The judge agrees with jsonschema-rs on whole values, and is never sure too early."""

import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from json_schemas import VALUES, schemas

from personae.evals.suites.draft_suite import read_drafts
from personae.evals.suites.maskbench import DATA
from personae.grammar.json.judge import Judge
from personae.grammar.json.text import Text
from personae.grammar.schema.document import parse_with_validator
from personae.grammar.schema.prepare import without_ignored
from personae.grammar.schema.references import resolved


def verdicts(judge: Judge, written: str) -> list[bool | None]:
    """Of each beginning of a text, and of the whole."""
    text, found = Text(), []
    for char in written:
        text.feed(char)
        assert text.root is not None
        found.append(judge.verdict(judge.document, text.root))
    whole = text.end()
    assert whole is not None
    return [*found, judge.verdict(judge.document, whole)]


@settings(max_examples=200)
@given(schemas(), VALUES)
def test_a_whole_value_is_judged_as_by_the_validator_and_no_beginning_of_a_valid_one_is_false(
    schema: dict[str, Any], value: Any
) -> None:
    *begun, whole = verdicts(Judge(schema), json.dumps(value))
    assert whole is jsonschema_rs.is_valid(schema, value)
    assert (not whole) not in begun


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"properties": {"a": {"type": "integer"}}}, '{"a":"'),
        ({"additionalProperties": False, "properties": {"ab": {}}}, '{"b'),
        ({"uniqueItems": True}, '[{"a":1,"b":[2]},{"b":[2.0],"a":1}'),
        ({"items": {"not": {"const": 1}}}, "[0,1,"),
        ({"maxLength": 2}, '"abc'),
        ({"pattern": "^a*b$"}, '"aac'),
        ({"enum": ["red", {"a": [1, 2]}]}, '{"a":[1,3,'),
        ({"oneOf": [{"maxItems": 3}, {"items": {"type": "null"}, "maxItems": 2}]}, "[1,2,3,4"),
        ({"required": ["a", "b"], "maxProperties": 2}, '{"c":1'),
        ({"propertyNames": {"maxLength": 1}}, '{"ab'),
        ({"if": {"required": ["a"]}, "then": False, "else": {"maxProperties": 1}}, '{"b":1,"'),
    ],
)
def test_what_can_no_longer_become_valid_is_false_as_soon_as_that_is_written(schema: Any, text: str) -> None:
    judge, begun = Judge(schema), Text(text)
    assert begun.root is not None
    assert judge.verdict(schema, begun.root) is False
    before = Text(text[:-1])
    assert before.root is None or judge.verdict(schema, before.root) is None


def test_a_schema_that_applies_itself_and_an_endless_number_end() -> None:
    schema = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"multipleOf": 3}]}}}
    assert verdicts(Judge(schema), "4")[-1] is not True
    assert verdicts(Judge({"multipleOf": 3}), "1e999999999")[-1] is not None
    nested = {"type": "array", "items": {"$ref": "#"}}
    assert verdicts(Judge(nested), "[" * 60 + "]" * 60)[-1] is True


@pytest.mark.skipif(not (DATA / "json-schema-test-suite").is_dir(), reason="the shared data are not here")
def test_the_official_suite_is_judged_as_by_the_validator() -> None:
    count = 0
    for _, cases in read_drafts(DATA / "json-schema-test-suite"):
        for case in cases:
            document, validator = parse_with_validator(json.dumps(case.schema))
            judge = Judge(resolved(without_ignored(document)))
            for name, instance, _ in case.instances:
                *begun, whole = verdicts(judge, json.dumps(instance, ensure_ascii=False))
                assert whole is validator.is_valid(instance), (case.name, name)
                assert not whole or False not in begun, (case.name, name)
                count += 1
    assert count > 2_000
