import json

from personae.grammar.schema.validate import MAX_VIOLATIONS, SchemaViolation, validate_answer
from personae.grammar.spec import GrammarSpec

UNIQUE = GrammarSpec(
    "json_schema", '{"type":"array","items":{"type":"integer"},"uniqueItems":true}', strict=False
)


def test_a_valid_answer_has_no_violations():
    outcome = validate_answer(UNIQUE, "[1, 2]")
    assert outcome.valid
    assert outcome.violations == ()


def test_each_violation_names_its_place():
    outcome = validate_answer(UNIQUE, '[1, 1, "x"]')
    assert not outcome.valid
    assert [violation.pointer for violation in outcome.violations] == ["#", "#/2"]
    assert "unique" in outcome.violations[0].message


def test_an_answer_that_is_not_json_is_invalid():
    outcome = validate_answer(UNIQUE, "[1, 2")
    assert not outcome.valid
    assert isinstance(outcome.violations[0], SchemaViolation)
    assert outcome.violations[0].pointer == "#"


def test_the_list_of_violations_is_bounded():
    outcome = validate_answer(UNIQUE, "[" + ",".join(['"x"'] * 100) + "]")
    assert len(outcome.violations) == MAX_VIOLATIONS


def test_a_violation_quotes_the_beginning_of_a_long_answer_and_ends_with_what_is_wrong():
    outcome = validate_answer(UNIQUE, json.dumps([1] * 5000))
    [violation] = outcome.violations
    assert len(violation.message) <= 400
    assert violation.message.startswith("[1,1,1,")
    assert violation.message.endswith("has non-unique elements")


def test_a_pattern_is_shown_as_the_schema_writes_it():
    schema = {
        "properties": {"a": {"pattern": r"^(?<n>.)\k<n>$"}},
        "patternProperties": {"^.b$": {"$ref": "#/$defs/short"}, "^.c$": {"allOf": [{"pattern": '^."$'}]}},
        "$defs": {"short": {"pattern": "^.$"}},
    }
    answer = {"a": "xy", "ab": "xyz", "ac": "é"}
    outcome = validate_answer(GrammarSpec("json_schema", json.dumps(schema)), json.dumps(answer))
    assert {violation.pointer: violation.message for violation in outcome.violations} == {
        "#/a": r'"xy" does not match "^(?<n>.)\\k<n>$"',
        "#/ab": '"xyz" does not match "^.$"',
        "#/ac": r'"é" does not match "^.\"$"',
    }


def test_a_pattern_within_an_embedded_document_is_shown_too():
    inner = {"$id": "https://example.com/inner", "patternProperties": {"^.$": {"pattern": "^.$"}}}
    schema = {"$ref": "https://example.com/inner", "$defs": {"inner": inner}}
    outcome = validate_answer(GrammarSpec("json_schema", json.dumps(schema)), '{"a": "xy"}')
    assert [violation.message[:20] for violation in outcome.violations] == ['"xy" does not match ']
