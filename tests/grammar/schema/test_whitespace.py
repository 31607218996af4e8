"""JSON may be indented as deep as its schema goes, and blanks end all the same."""

import json
from typing import Any

import pytest
from grammar_walks import accepts
from worst import WORST, answer, text_vocabulary

from personae.grammar.budget.grammar import BudgetGrammar
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.schema.whitespace import MAX_INDENT, indent_of
from personae.grammar.spec import GrammarSpec

VOCABULARY = text_vocabulary()
COMPILER = GrammarCompiler(VOCABULARY, sandboxed=False)
CLOSED: dict[str, Any] = {"type": "object", "additionalProperties": False}


def nested(levels: int) -> tuple[dict[str, Any], Any]:
    """A schema of so many objects within one another, and a value."""
    schema: dict[str, Any] = {"type": "integer"}
    value: Any = 1
    for _ in range(levels):
        schema = CLOSED | {"properties": {"a": schema}, "required": ["a"]}
        value = {"a": value}
    return schema, value


def grammar(schema: Any) -> BudgetGrammar:
    compiled = COMPILER.compile(GrammarSpec("json_schema", json.dumps(schema)))
    assert isinstance(compiled, BudgetGrammar)
    return compiled


@pytest.mark.parametrize("indent", [1, 2, 4, "\t"])
@pytest.mark.parametrize("levels", [1, 4, 5, 9, 15])
def test_an_answer_may_be_indented_as_deep_as_it_goes(levels: int, indent: int | str) -> None:
    schema, value = nested(levels)
    text = json.dumps(value, indent=indent).encode()
    assert accepts(grammar(schema).matcher(), VOCABULARY, text)
    assert accepts(COMPILER.compile(GrammarSpec("json_object")).matcher(), VOCABULARY, text)


def test_blanks_end_behind_a_line_break_and_without_one() -> None:
    schema, _ = nested(6)
    for blanks, allowed in ((b" " * 16, True), (b" " * 17, False), (b"\n" + b" " * 24, True)):
        text = b"{" + blanks + b'"a":'
        assert (grammar(schema).matcher().feed([*text]) == len(text)) is allowed
    deeper = b"{\n" + b" " * 25
    assert grammar(schema).matcher().feed([*deeper]) < len(deeper)


def test_answers_of_a_model_that_writes_blanks_close() -> None:
    compiled = grammar(nested(6)[0])
    for spare in (0, 5, 40, 200):
        budget = compiled.shortest + spare
        ids = answer(compiled.matcher(budget), VOCABULARY, WORST["blanks"], budget, spare)
        plain = compiled.matcher()
        assert plain.feed(ids) == len(ids)
        assert plain.accept(256)


def test_the_depth_is_that_of_the_deepest_value() -> None:
    leaf = {"type": "string"}
    assert indent_of(leaf) == 0
    assert indent_of({"type": "array", "items": leaf}) == 4
    assert indent_of({"enum": [[[1]], 2]}) == 8
    assert indent_of({"anyOf": [leaf, nested(3)[0]]}) == 12
    assert indent_of({"$ref": "#/$defs/a", "$defs": {"a": nested(2)[0]}}) == 8
    assert indent_of({"type": "object"}) == MAX_INDENT
    assert indent_of({"$ref": "#"}) == MAX_INDENT
    wide = {
        f"n{at}": CLOSED | {"properties": {k: {"$ref": f"#/$defs/n{at + 1}"} for k in "abcdefgh"}}
        for at in range(60)
    }
    assert indent_of({"$ref": "#/$defs/n0", "$defs": wide | {"n60": leaf}}) == MAX_INDENT
