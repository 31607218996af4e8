"""Text in an item that `contains` counts makes it one that does not count: the answer still closes."""

import json
from typing import Any

import jsonschema_rs
import pytest
from worst import WORST, answer, text_of, text_vocabulary

from personae.grammar.budget.grammar import BudgetGrammar
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.spec import GrammarSpec

VOCABULARY = text_vocabulary()
COMPILER = GrammarCompiler(VOCABULARY, sandboxed=False)
SCHEMA = {"type": "array", "contains": {"const": "key"}, "items": {"type": "string"}}
MULTIPLES = {"type": "integer", "multipleOf": 255}


@pytest.mark.parametrize("prefer", WORST)
@pytest.mark.parametrize("spare", [0, 2, 4, 9])
def test_an_array_that_has_to_contain_a_string_closes_whatever_text_the_model_likes(
    prefer: str, spare: int
) -> None:
    grammar = COMPILER.compile(GrammarSpec("json_schema", json.dumps(SCHEMA)))
    budget = grammar.shortest + spare
    text = text_of(answer(grammar.matcher(budget), VOCABULARY, WORST[prefer], budget, spare), VOCABULARY)
    assert jsonschema_rs.is_valid(SCHEMA, json.loads(text)), text


@pytest.mark.parametrize("any_order", [False, True])
@pytest.mark.parametrize(
    ("counted", "shortest"),
    [
        ({"contains": {"const": 1785}, "minContains": 3}, "[1785,1785,1785]"),
        ({"contains": {"minimum": 1000}}, "[1020]"),
        ({"contains": {"maximum": -300}, "maxContains": 1, "minItems": 2}, "[-510,0]"),
        ({"contains": {"multipleOf": 4}, "minContains": 2}, "[0,0]"),
    ],
)
def test_the_shortest_array_that_contains_a_multiple_has_no_other_multiples(
    counted: dict[str, Any], shortest: str, any_order: bool
) -> None:
    schema = {"type": "array", "items": MULTIPLES, **counted}
    grammar = COMPILER.compile_here(
        GrammarSpec("json_schema", json.dumps(schema), compact=True, any_order=any_order)
    )
    assert isinstance(grammar, BudgetGrammar)
    assert bytes(grammar.shortest_plan.piece).decode() == shortest
