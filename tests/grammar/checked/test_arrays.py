"""Sets of values that are no plain strings, and arrays that must contain something, token by token."""

import json
from itertools import product
from typing import Any

import jsonschema
import jsonschema_rs
import pytest
from grammar_walks import accepts
from worst import WORST, answer, text_of, text_vocabulary

from personae.grammar.checked.grammar import CheckedGrammar
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.spec import GrammarSpec

VOCABULARY = text_vocabulary()
COMPILER = GrammarCompiler(VOCABULARY, sandboxed=False)
STRING = {"type": "string"}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "kind": {"enum": ["a", "b"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
ITEMS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "integers": ({"type": "integer"}, [[1, 12, 121, -1], [], [0]], [[1, 1], [12, 1, 12], [-3, 3, -3]]),
    "bounded integers": (
        {"type": "integer", "minimum": -3, "exclusiveMaximum": 200},
        [[-3, 199, 0, 19, 1]],
        [[200], [-4], [5, 5]],
    ),
    "numbers": ({"type": "number"}, [[1, 1.5, -0.5, 0.25]], [[1, 1.0], [1.5, 0, 1.5]]),
    "numbers of one": (
        {"type": "number", "minimum": 0, "maximum": 1},
        [[0, 0.5, 1]],
        [[1.5], [0.5, 0.5], [-0.5]],
    ),
    "short texts": (
        {"type": "string", "maxLength": 2},
        [["", "a", "ab", "b"]],
        [["abc"], ["a", "a"], ["", ""]],
    ),
    "few texts": (
        {"type": "string", "pattern": "^(ab?|b{0,2})$"},
        [["a", "ab", "", "b", "bb"]],
        [["a", "a"], ["bb", "b", "bb"], ["c"]],
    ),
    "dates": ({"type": "string", "format": "date"}, [["2024-02-29", "2024-02-28"]], [["2024-02-29"] * 2]),
    "sets of texts": (
        {"type": "array", "uniqueItems": True, "items": {"type": "string"}},
        [[[], ["a"], ["a", "b"], ["b", "a"]]],
        [[["a", "a"]], [["a"], ["a"]], [[], ["a"], []]],
    ),
    "objects with sets": (
        {
            "type": "object",
            "properties": {
                "n": {"type": "array", "uniqueItems": True, "items": {"type": "integer"}},
                "t": {
                    "type": "array",
                    "uniqueItems": True,
                    "items": {"type": "string", "pattern": "^[a-z]+$"},
                },
            },
            "required": ["n"],
            "additionalProperties": False,
        },
        [[{"n": [1, 12]}, {"n": [12, 1]}, {"n": [1], "t": ["a", "ab"]}]],
        [[{"n": [1, 1]}], [{"n": [1]}, {"n": [1]}], [{"n": [], "t": ["a", "a"]}]],
    ),
    "objects": (
        POINT,
        [[{"x": 1, "kind": "a"}, {"x": 1, "kind": "b"}, {"kind": "a"}]],
        [[{"kind": "a"}, {"kind": "a"}], [{"x": 1, "kind": "b"}, {"kind": "b"}, {"x": 1, "kind": "b"}]],
    ),
    "open objects": (
        {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
        [[{"id": 1}, {"id": 2}, {"id": 1, "more": [True]}]],
        [[{"id": 1}, {"id": 1}], [{"id": 1, "a": 1}, {"id": 1, "a": 1}]],
    ),
    "two kinds of objects": (
        {
            "anyOf": [
                POINT,
                {
                    "type": "object",
                    "properties": {"kind": {"const": "a"}, "y": {"type": "null"}, "x": {"type": "integer"}},
                    "required": ["kind", "x"],
                },
            ]
        },
        [[{"x": 1, "kind": "a"}, {"kind": "a", "y": None, "x": 1}]],
        [[{"x": 1, "kind": "a"}, {"x": 1, "kind": "a"}]],
    ),
    "arrays": (
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        [[[], [True], [True, False], [False]]],
        [[[True], [True]], [[True, True, True]]],
    ),
    "texts or numbers": (
        {"type": ["string", "integer", "null"], "maxLength": 3},
        [["1", 1, None, "nul"]],
        [["1", "1"], [1, 1], [None, None], ["abcd"]],
    ),
    "anything": (
        True,
        [[1, "1", True, None, [1], {"a": 1}, {"a": 2}, [], {}, "a"]],
        [[1, 1], [{"a": [1]}, {"a": [1]}], [[], []], ["a", "a"], [None, None]],
    ),
    "fractions": (
        {"type": "number", "multipleOf": 0.5, "minimum": 0.5},
        [[0.5, 1, 1.5]],
        [[0.5, 0.5], [0.25], [0]],
    ),
    "many listed": (
        {"enum": [f"word{n}" for n in range(70)]},
        [["word1", "word10", "word11"]],
        [["word1", "word10", "word1"], ["word70"]],
    ),
    "objects with one of thousands of texts": (
        {
            "type": "object",
            "properties": {"name": {"enum": [f"word{n}" for n in range(3_000)] + ["a\tb", 1]}},
            "required": ["name"],
        },
        [[{"name": "word1"}, {"name": "word10"}, {"name": "word2999"}, {"name": "a\tb"}, {"name": 1}]],
        [[{"name": "word1"}, {"name": "word1"}], [{"name": "word3000"}], [{"name": 1}, {"name": 1}]],
    ),
}
CONTAINING: dict[str, dict[str, Any]] = {
    "one": {"contains": {"const": "a"}},
    "two": {"contains": STRING, "minContains": 2},
    "at most one": {"contains": STRING, "minContains": 0, "maxContains": 1},
    "one of two or three": {"contains": STRING, "minItems": 2, "maxItems": 3},
    "one or two of four": {"contains": STRING, "maxContains": 2, "maxItems": 4},
    "one or two of other items": {
        "items": {"type": ["string", "integer"]},
        "contains": {"const": 1},
        "maxContains": 2,
    },
    "one behind the first": {"prefixItems": [STRING], "contains": {"type": "integer"}},
}


def checked(schema: Any) -> CheckedGrammar:
    grammar = COMPILER.compile(GrammarSpec("json_schema", json.dumps(schema)))
    assert isinstance(grammar, CheckedGrammar)
    return grammar


def is_accepted(grammar: CheckedGrammar, value: Any) -> bool:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return accepts(grammar.matcher(), VOCABULARY, text.encode())


@pytest.mark.parametrize("name", ITEMS)
def test_exactly_the_sets_are_accepted(name: str) -> None:
    items, valid, invalid = ITEMS[name]
    schema = {"type": "array", "uniqueItems": True, "items": items}
    grammar, is_valid = checked(schema), jsonschema.Draft202012Validator(schema).is_valid
    for value in valid + invalid:
        assert is_accepted(grammar, value) is is_valid(value) is (value in valid), value
    for value in valid:
        assert not is_accepted(grammar, [*value, *value[:1]]) or not value


@pytest.mark.parametrize("name", CONTAINING)
def test_exactly_the_arrays_that_contain_what_they_must_are_accepted(name: str) -> None:
    schema = {"type": "array", **CONTAINING[name]}
    grammar, is_valid = checked(schema), jsonschema_rs.validator_for(schema).is_valid
    values = [list(value) for count in range(4) for value in product(["a", "b", 1, None], repeat=count)]
    outcomes = [(value, is_accepted(grammar, value)) for value in values]
    assert [value for value, taken in outcomes if taken != is_valid(value)] == []
    assert {taken for _, taken in outcomes} == {False, True}


@pytest.mark.parametrize("name", [*ITEMS, *CONTAINING])
def test_an_array_closes_within_its_budget_and_is_valid_whatever_the_model_prefers(name: str) -> None:
    rest = CONTAINING[name] if name in CONTAINING else {"uniqueItems": True, "items": ITEMS[name][0]}
    schema = {"type": "array", "minItems": 2, **rest}
    grammar = checked(schema)
    for spare, prefer in enumerate(WORST.values()):
        budget = grammar.shortest + 7 * spare
        ids = answer(grammar.matcher(budget), VOCABULARY, prefer, budget, spare)
        value = json.loads(text_of(ids, VOCABULARY))
        assert jsonschema.Draft202012Validator(schema).is_valid(value), value


@pytest.mark.parametrize("size", [4, 5])
def test_few_values_are_all_used_and_no_more_begin(size: int) -> None:
    schema = {
        "type": "array",
        "uniqueItems": True,
        "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "minItems": size,
        "maxItems": 7,
    }
    values = [[], [True], [False], [True, True], [True, False], [False, True], [False, False]]
    grammar = checked(schema)
    for place in range(len(values)):
        turned = values[place:] + values[:place]
        for count in (size - 1, size, len(values)):
            assert is_accepted(grammar, turned[:count]) is (count >= size)
