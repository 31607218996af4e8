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
