"""Sets of strings: no item is there twice, in whole answers and within chat answers."""

import json
from typing import Any

import numpy as np
import pytest

from personae.errors import GrammarError
from personae.evals.suites.maskbench import byte_vocabulary
from personae.grammar.backend import BoundGrammar
from personae.grammar.bitmask import words_of
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.reasoning.format import Thinks
from personae.grammar.reasoning.registry import reasoning_format
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.answer import AnswerShape
from personae.grammar.structure.elements import Json

COMPILER = GrammarCompiler(byte_vocabulary(), sandboxed=False)
SET = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
TAGS = {"type": "object", "properties": {"t": SET}, "required": ["t"], "additionalProperties": False}
WORDS = [
    '"',
    '",',
    '","',
    '["',
    '"a"',
    '"]',
    'a"',
    '","a"',
    '["a"',
    '["a","a"',
    ',"',
    '"a","a"',
    "ab",
    '\\"',
    '", "',
    '"}',
    ',"b","b"',
]
VOCABULARY = byte_vocabulary(WORDS)


def taken(grammar: BoundGrammar, text: bytes) -> bool:
    matcher = grammar.matcher()
    return matcher.feed(text) == len(text) and matcher.accept(256)


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (
            SET,
            [[], ["a"], ["a", "ab", "abc"], ["", "a"], ['"', '\\"']],
            [["a", "b", "a"], ["", ""], ['"', '"']],
        ),
        (SET | {"minItems": 3}, [["a", "b", "c"]], [["a", "a", "b"], ["a", "b"]]),
        (
            {"type": "array", "items": SET},
            [[["a"], ["a"]], []],
            [[["a"], ["b", "b"]]],
        ),
        (
            {"type": "object", "properties": {"t": SET, "u": {"type": "array", "items": {"type": "string"}}}},
            [{"t": ["a"], "u": ["a", "a"]}, {"u": ["x"], "z": ["y", "y"]}],
            [{"t": ["a", "a"]}, {"t": ["b", "a", "b"], "u": []}],
        ),
        (
            {
                "$ref": "#/$defs/s",
                "$defs": {
                    "s": {"type": ["array", "null"], "items": {"$ref": "#/$defs/t"}, "uniqueItems": True},
                    "t": {"type": "string", "minLength": 1},
                },
            },
            [["a", "b"], None],
            [["a", "a"], [""]],
        ),
    ],
)
def test_of_sets_exactly_the_valid_ones_are_accepted(
    schema: dict[str, Any], valid: list[Any], invalid: list[Any]
) -> None:
    grammar = COMPILER.compile(GrammarSpec("json_schema", json.dumps(schema)))
    assert all(taken(grammar, json.dumps(one).encode()) for one in valid)
    assert not any(taken(grammar, json.dumps(one).encode()) for one in invalid)


@pytest.mark.parametrize("text", ['["a","a', '["a","', '["a"', "[", '["a","ab","', '["\\"","', '["a",'])
def test_a_mask_allows_what_is_accepted_and_nothing_else(text: str) -> None:
    matcher = (
        GrammarCompiler(VOCABULARY, sandboxed=False)
        .compile(GrammarSpec("json_schema", json.dumps(SET)))
        .matcher()
    )
    assert matcher.feed(text.encode()) == len(text)
    mask = np.zeros((1, words_of(VOCABULARY.size)), np.int32)
    matcher.fill(mask, 0)
    for token in range(VOCABULARY.size - 1):
        if mask[0, token // 32] >> token % 32 & 1:
            snapshot = matcher.snapshot()
            assert matcher.follows([token]) == 1, VOCABULARY.tokens[token]
            assert matcher.accept(token), VOCABULARY.tokens[token]
            matcher.restore(snapshot)
    assert not mask[0, 256 + WORDS.index('"a","a"') >> 5] >> (256 + WORDS.index('"a","a"')) % 32 & 1


def test_what_is_taken_back_is_forgotten() -> None:
    matcher = COMPILER.compile(GrammarSpec("json_schema", json.dumps(SET))).matcher()
    assert matcher.feed(b'["a') == 3
    snapshot = matcher.snapshot()
    assert matcher.feed(b'","b"') == 5
    matcher.restore(snapshot)
    text = b'b","a","ab"'
    assert matcher.fork().feed(text) == len(text) - 1
    assert matcher.feed(text) == len(text) - 1


@pytest.mark.parametrize(
    ("thinks", "before"),
    [
        (Thinks.NO, b""),
        (Thinks.OPEN, b'hm {"t":["a"</think>\n'),
        (Thinks.MAYBE, b'<think>{"t":["a","a"]</think>'),
        (Thinks.MAYBE, b""),
    ],
)
def test_sets_are_kept_behind_reasoning(thinks: Thinks, before: bytes) -> None:
    reasoning = None if thinks is Thinks.NO else reasoning_format("think")
    spec = AnswerShape(reasoning, thinks, content=Json(TAGS, True, "schema")).spec()
    assert spec is not None
    grammar = COMPILER.compile_here(spec)
    for text, valid in ((b'{"t":["a","b"]}', True), (b'{"t": ["a"]}', True), (b'{"t":["a","a"]}', False)):
        assert taken(grammar, before + text) is valid


@pytest.mark.parametrize("items", [{"type": "integer", "multipleOf": 3}, {"type": "object"}])
def test_other_sets_are_refused_by_name(items: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match=r"'(uniqueItems|items|multipleOf)' at #/"):
        COMPILER.compile_here(GrammarSpec("json_schema", json.dumps(SET | {"items": items})))
