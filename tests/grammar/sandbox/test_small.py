"""Which specs are small enough to be compiled beside the steps."""

import json
from typing import Any

import pytest

from personae.evals.hostile import laughs
from personae.grammar.sandbox.small import is_small
from personae.grammar.spec import GrammarSpec


def spec_of(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "small"),
    [
        ({"type": "string", "maxLength": 200}, True),
        ({"type": "string", "maxLength": 100_000}, False),
        ({"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"}, True),
        ({"type": "string", "pattern": r"^[a-z]+$"}, True),
        ({"type": "string", "pattern": r"(a|aa)*b"}, False),
        ({"type": "string", "pattern": r"(a{10}){10}"}, False),
        ({"type": "string", "pattern": r".*a.*b"}, False),
        ({"type": "string", "pattern": "a{5000}"}, False),
        ({"patternProperties": {"(a|b)*c{900}": {}}}, False),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, True),
        ({"type": "integer", "multipleOf": 5}, True),
        ({"type": "number", "multipleOf": 0.01}, True),
        ({"type": "integer", "multipleOf": 9_999_991}, False),
        ({"allOf": [{"multipleOf": step} for step in (6.75, 19, 2.125)]}, False),
        (laughs(3), True),
        (laughs(40), False),
        ({"enum": [f"value {n}" for n in range(2000)]}, False),
        ({"properties": {f"p{n}": {"type": "string"} for n in range(100)}}, True),
    ],
)
def test_small_is_what_says_little_and_means_little(schema: Any, small: bool) -> None:
    assert is_small(spec_of(schema)) is small


@pytest.mark.parametrize(
    ("spec", "small"),
    [
        (GrammarSpec("json_object"), True),
        (GrammarSpec("regex", "[ab]{8}"), True),
        (GrammarSpec("regex", "((a{100}){100}){100}"), False),
        (GrammarSpec("ebnf", 'root ::= "a"'), False),
        (GrammarSpec("lark", 'start: "a"'), False),
        (GrammarSpec("json_schema", "{"), True),
    ],
)
def test_grammars_are_never_small_and_patterns_by_what_they_repeat(spec: GrammarSpec, small: bool) -> None:
    assert is_small(spec) is small
