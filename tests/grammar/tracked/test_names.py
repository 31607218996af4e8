"""Objects that must have several properties that are not listed: none is there twice, and so they count."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from byte_bpe import byte_level_vocabulary
from grammar_walks import walk
from worst import WORST, answer, text_of, text_vocabulary

from personae.errors import GrammarError
from personae.evals.suites.maskbench import byte_vocabulary
from personae.grammar.bitmask import words_of
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.schema.patterns import endless
from personae.grammar.spec import GrammarSpec

COMPILER = GrammarCompiler(byte_vocabulary(), sandboxed=False)
WALKER = GrammarCompiler(byte_level_vocabulary(), sandboxed=False)
WIDER = text_vocabulary()
ADVERSE = GrammarCompiler(WIDER, sandboxed=False)
WORDS = [
    '","a"',
    ',"a":1',
    '{"a":1',
    '{"a":1,"a"',
    '"a"',
    '":1,"',
    '1,"b"',
    '"}',
    "}}",
    '},"a":{',
    'a":',
    ":{",
]
VOCABULARY = byte_vocabulary(WORDS)
TOKENS = GrammarCompiler(VOCABULARY, sandboxed=False)

NUMBER = {"type": "integer"}
THREE: dict[str, Any] = {"type": "object", "minProperties": 3, "additionalProperties": NUMBER}
SCHEMAS: dict[str, Any] = {
    "three": THREE,
    "one of them listed": {**THREE, "properties": {"a": NUMBER}, "required": ["a"]},
    "some listed": {**THREE, "properties": {"a": NUMBER, "b": {"type": "boolean"}}},
    "no more": {**THREE, "maxProperties": 3, "properties": {"a": NUMBER}},
    "by a pattern": {
        "type": "object",
        "minProperties": 2,
        "patternProperties": {"^[a-z]+$": NUMBER},
        "additionalProperties": False,
    },
    "within each other": {
        "type": "object",
        "minProperties": 2,
        "additionalProperties": {"type": "object", "minProperties": 2, "additionalProperties": NUMBER},
    },
}
VALUES = [
    {},
    {"a": 1},
    {"a": 1, "b": 2},
    {"b": True, "x": 1, "y": 2},
    {"a": 1, "b": True, "y": 2},
    {"a": 1, "x": 3, "y": 4},
    {"a": 1, "x": 3, "y": 4, "z": 5},
    {"x": {"a": 1, "b": 2}, "y": {"a": 1, "b": 2}},
    {"x": {"a": 1, "b": 2}, "y": {"a": 1}},
    {"x1": 1, "y": 2},
]


def accepted(grammar: Any, text: str) -> bool:
    matcher = grammar.matcher()
    return matcher.feed(text.encode()) == len(text.encode()) and matcher.accept(256)


@pytest.mark.parametrize("any_order", [False, True])
@pytest.mark.parametrize("name", SCHEMAS)
def test_objects_are_accepted_as_jsonschema_says(name: str, any_order: bool) -> None:
    schema = SCHEMAS[name]
    grammar = COMPILER.compile(GrammarSpec("json_schema", json.dumps(schema), any_order=any_order))
    judge = jsonschema.Draft202012Validator(schema)
    for one in VALUES:
        assert accepted(grammar, json.dumps(one, separators=(",", ":"))) == judge.is_valid(one), one


@pytest.mark.parametrize(
    "text",
    [
        '{"x":1,"y":2,"x":3}',
        '{"x":1,"x":2,"x":3,"y":4}',
        '{"y":1,"x":2, "x" : 3,"z":4}',
        '{"\\n":1,"\\n":2,"x":3,"y":4}',
    ],
)
def test_no_property_is_written_twice(text: str) -> None:
    grammar = COMPILER.compile(GrammarSpec("json_schema", json.dumps(THREE)))
    assert not accepted(grammar, text)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_random_walk_never_gets_stuck_and_ends_in_a_valid_object(name: str) -> None:
    grammar = WALKER.compile(GrammarSpec("json_schema", json.dumps(SCHEMAS[name])))
    for seed in range(4):
        text = walk(grammar.matcher(), byte_level_vocabulary(), random.Random(seed), budget=20)
        jsonschema.validate(json.loads(text, object_pairs_hook=_once), SCHEMAS[name])


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("prefer", WORST)
def test_an_object_closes_within_its_budget_whatever_the_model_prefers(name: str, prefer: str) -> None:
    grammar = ADVERSE.compile(GrammarSpec("json_schema", json.dumps(SCHEMAS[name])))
    for room in (0, 5):
        budget = grammar.shortest + room
        text = text_of(answer(grammar.matcher(budget), WIDER, WORST[prefer], budget, room), WIDER)
        jsonschema.validate(json.loads(text, object_pairs_hook=_once), SCHEMAS[name])


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


@pytest.mark.parametrize(
    "text", ["", "{", '{"a":1', '{"a":1,', '{"a":1,"', '{"a":1,"a', '{"a":1,"aa":2', '{"a":1,"aa":2,"a']
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_mask_allows_only_what_is_accepted(text: str, nested: bool) -> None:
    schema = {"type": "object", "minProperties": 3, "additionalProperties": THREE} if nested else THREE
    before = '{"a":' if nested else ""
    matcher = TOKENS.compile(GrammarSpec("json_schema", json.dumps(schema))).matcher()
    assert matcher.feed((before + text).encode()) == len(before + text)
    mask = np.zeros((1, words_of(VOCABULARY.size)), np.int32)
    matcher.fill(mask, 0)
    allowed = [token for token in range(VOCABULARY.size) if mask[0, token // 32] >> token % 32 & 1]
    assert allowed
    for token in allowed:
        snapshot = matcher.snapshot()
        assert matcher.follows([token]) == 1, VOCABULARY.tokens[token]
        assert matcher.accept(token), VOCABULARY.tokens[token]
        matcher.restore(snapshot)
    assert {token for token in range(256) if matcher.follows([token]) == 1} <= set(allowed)


def test_names_that_are_few_are_refused() -> None:
    schema = {**THREE, "patternProperties": {"^[a-d]$": NUMBER}, "additionalProperties": False}
    with pytest.raises(GrammarError, match="cannot be enforced"):
        COMPILER.compile_here(GrammarSpec("json_schema", json.dumps(schema)))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("^[a-z]+$", True), ("a", True), ("^(a|b)$", False), ("^(a|b+)$", False), ("^.{1,3}$", False)],
)
def test_a_pattern_is_endless_if_no_beginning_settles_the_rest(pattern: str, expected: bool) -> None:
    assert endless(pattern) is expected
