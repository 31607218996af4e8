"""Text in an item that `contains` counts makes it one that does not count: the answer still closes."""

import json

import jsonschema_rs
import pytest
from worst import WORST, answer, text_of, text_vocabulary

from personae.grammar.compiler import GrammarCompiler
from personae.grammar.spec import GrammarSpec

VOCABULARY = text_vocabulary()
COMPILER = GrammarCompiler(VOCABULARY, sandboxed=False)
SCHEMA = {"type": "array", "contains": {"const": "key"}, "items": {"type": "string"}}


@pytest.mark.parametrize("prefer", WORST)
@pytest.mark.parametrize("spare", [0, 2, 4, 9])
def test_an_array_that_has_to_contain_a_string_closes_whatever_text_the_model_likes(
    prefer: str, spare: int
) -> None:
    grammar = COMPILER.compile(GrammarSpec("json_schema", json.dumps(SCHEMA)))
    budget = grammar.shortest + spare
    text = text_of(answer(grammar.matcher(budget), VOCABULARY, WORST[prefer], budget, spare), VOCABULARY)
    assert jsonschema_rs.is_valid(SCHEMA, json.loads(text)), text
