"""Answers are checked at once only where that is seen to take little; elsewhere the kernel ends a check."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from personae.evals.hostile import retried
from personae.grammar.sandbox.checker import AnswerToCheck, Checker, check_at_once
from personae.grammar.sandbox.server import SandboxLimits
from personae.grammar.schema.validate import validate_answer
from personae.grammar.spec import GrammarSpec

UNIQUE = {"type": "array", "uniqueItems": True}


def part(schema: Any, answer: str) -> AnswerToCheck:
    return GrammarSpec("json_schema", json.dumps(schema), strict=False), answer


@pytest.fixture(scope="module")
def checker() -> Iterator[Checker]:
    checker = Checker(SandboxLimits(processor=0.3, patience=60.0))
    yield checker
    checker.close()


@pytest.mark.parametrize(
    "schema",
    [
        retried(15),
        retried(40),
        {"$ref": "#"},
        {"anyOf": [{"items": {"$ref": "#"}}] * 2},
        {"$dynamicRef": "#"},
        {"$anchor": "a", "items": {"$ref": "#a"}},
        {"pattern": "((a*)*)*b(?!c)"},
        {"pattern": "(?=a*b)"},
        {"patternProperties": {"(a?)(a?)\\1": True}},
        {"enum": [f"value {n}" for n in range(2000)]},
    ],
)
def test_what_may_take_long_is_not_checked_at_once(schema: Any) -> None:
    assert check_at_once([part(schema, '"aaaaaaaa"')]) is None


def test_neither_are_a_long_answer_and_many_answers() -> None:
    assert check_at_once([part(UNIQUE, "[1,2]")]) == [validate_answer(*part(UNIQUE, "[1,2]"))]
    assert check_at_once([part(UNIQUE, f"[{'1,' * 5000}1]")]) is None
    assert check_at_once([part(UNIQUE, "[1,2]")] * 5000) is None


@pytest.mark.parametrize("schema", [{"pattern": "^a+$"}, {"$ref": "#/$defs/a", "$defs": {"a": UNIQUE}}, True])
def test_ordinary_schemas_are(schema: Any) -> None:
    assert check_at_once([part(schema, "[1]")]) == [validate_answer(*part(schema, "[1]"))]


def test_the_outcome_is_the_same_there(checker: Checker) -> None:
    parts = [
        part(UNIQUE, "[1,1]"),
        part(UNIQUE, "[1"),
        part(retried(3), '"a"'),
        part(retried(3), '"a long text"'),
    ]
    outcomes = checker.check(parts)
    assert outcomes == [validate_answer(*one) for one in parts]
    assert [one.valid for one in outcomes] == [False, False, False, True]


def test_a_check_that_does_not_end_is_ended_and_the_next_is_made(checker: Checker) -> None:
    assert checker.check([part(retried(40), '"a"')]) is None
    assert checker.check([part({"type": "nothing"}, "1")]) is None
    assert checker.check([part(UNIQUE, "[1,1]")]) == [validate_answer(*part(UNIQUE, "[1,1]"))]
