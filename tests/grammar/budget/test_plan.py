"""What becomes of a completion as an answer goes on."""

import json
import random
import re
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sandbox_limits import PATIENT
from worst import text_of, text_vocabulary

from personae.grammar.budget.completion import open_brackets
from personae.grammar.budget.completion import path as spelled
from personae.grammar.budget.matcher import BudgetMatcher
from personae.grammar.budget.planner import Hints
from personae.grammar.budget.table import LONG, STOP, TokenTable
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.spec import GrammarSpec

VOCABULARY = text_vocabulary(["<tool>"])
TABLE = TokenTable(VOCABULARY)
COMPILER = GrammarCompiler(VOCABULARY, limits=PATIENT)

pieces = st.lists(st.sampled_from([*b'{}[]",:the quick name 12', STOP + 1]), max_size=60).map(tuple)


@given(st.lists(pieces, min_size=1, max_size=6), st.integers(0, 60))
def test_however_plans_follow_one_another_each_is_spelled_in_the_fewest_tokens(many: Any, cut: int) -> None:
    path = None
    for piece in many:
        for one in (piece, piece[cut:], (*b'"a"', *piece[cut:])):
            path = spelled(TABLE, one, path)
            assert path is not None
            assert (path.piece, path.tokens) == (one, TABLE.spell_shortest(one))
            for length in range(len(one) + 1):
                rest = path.after(length)
                assert rest is not None
                assert (rest.piece, rest.tokens) == (one[length:], TABLE.spell_shortest(one[length:]))
                assert (rest.count, rest.first) == (len(rest.tokens), next(iter(rest.tokens), None))


@given(pieces, st.lists(st.tuples(pieces, st.integers(0, 60), st.integers(0, 9)), max_size=6))
def test_very_long_plans_that_share_an_end_are_spelled_as_each_alone(first: Any, many: Any) -> None:
    whole = (*first, *b'{"a quick name": [1, 2], "the": ""}' * (1 + LONG // 32))
    path = spelled(TABLE, whole)
    for begins, cut, lost in many:
        piece = (*begins, *whole[cut : len(whole) - lost])
        assert len(piece) > LONG
        alone, path = spelled(TABLE, piece), spelled(TABLE, piece, path)
        assert alone is not None
        assert path is not None
        assert (path.count, path.tokens) == (alone.count, alone.tokens)
        for length in range(lost, 90, 10):  # each of them in some example
            rest, other = path.after(length), alone.after(length)
            assert (rest and rest.tokens) == (other and other.tokens)


@pytest.mark.parametrize(
    ("piece", "depth"),
    [
        (b"", 0),
        (b'"', 0),
        (b"}", 1),
        (b'"}]}', 3),
        (b'x","b":""}]', 2),
        (b',{"a":[]}]}', 2),
        (b'"]}]}"}', 4),  # a text of brackets, or after one: as many as it may be
        (b'{"a":{}}', 0),
        (b'\\"}"}', 1),
    ],
)
def test_the_brackets_that_a_completion_closes_are_counted_within_a_string_or_not(piece, depth) -> None:
    assert open_brackets(tuple(piece)) == depth


@given(st.lists(st.binary(max_size=6).map(lambda text: text.replace(b"\xff", b"a"))), st.binary(max_size=3))
def test_a_begun_word_goes_on_as_the_most_useful_words_do(words: list[bytes], begun: bytes) -> None:
    going_on = [word[len(begun)] for word in words if word.startswith(begun) and len(word) > len(begun)]
    hints = Hints(words)
    for _ in range(2):
        assert list(hints.after(begun)) == list(dict.fromkeys(going_on))


@given(st.lists(st.lists(st.integers(0, 2), max_size=40).map(tuple), max_size=20))
def test_what_texts_end_with_is_tried_from_the_shortest_on(ends: list[tuple[int, ...]]) -> None:
    every = dict.fromkeys(end[start:] for end in ends for start in range(len(end)))
    assert list(Hints(ends=ends).parts) == sorted(every, key=len)[:256]


def test_of_very_long_texts_only_the_short_ends_are_looked_at() -> None:
    tracemalloc.start()
    parts = Hints(ends=[tuple(range(256)) * 20]).parts
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [len(part) for part in parts] == [*range(1, 257)]
    assert peak < 2**20


SCHEMAS: dict[str, Any] = {
    "bounded": {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 3},
    "patterns": {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
            "day": {"type": "string", "format": "date"},
            "note": {"type": "string", "minLength": 4},
        },
        "required": ["id", "day", "note"],
    },
    "end": {"type": "array", "items": {"type": "string", "pattern": "end$"}, "minItems": 2},
    "not_semicolon": {"type": "array", "items": {"type": "string", "pattern": "^[^;]*end$"}, "minItems": 2},
    "kinds": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "a"}, "x": {"type": "string"}},
                "required": ["kind", "x"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {"kind": {"type": "string", "minLength": 3}, "y": {"type": "integer"}},
                "required": ["kind", "y"],
                "additionalProperties": False,
            },
        ]
    },
    "named": {
        "type": "object",
        "properties": {"abc": {"type": "array", "items": {"type": "integer"}, "minItems": 4}},
        "additionalProperties": {"type": "string"},
        "required": ["z"],
    },
    "numbers": {
        "type": "array",
        "items": {"anyOf": [{"type": "integer", "minimum": 120}, {"type": "null"}]},
        "minItems": 3,
    },
    "nullable": {
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "null"}, {"type": "string", "minLength": 2}]}, "b": {}},
        "required": ["a", "b"],
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
@settings(max_examples=12)
@given(st.randoms(use_true_random=False), st.integers(0, 40))
def test_what_is_said_to_leave_a_plan_as_it_is_does_so(name: str, random: random.Random, spare: int) -> None:
    """The short way comes to where a matcher gets that replays the tokens, and searches."""
    grammar = COMPILER.compile(GrammarSpec("json_schema", json.dumps(SCHEMAS[name])))
    budget = grammar.shortest + spare
    matcher = grammar.matcher(budget)
    assert isinstance(matcher, BudgetMatcher)
    tokens: list[int] = []
    while len(tokens) < budget and not matcher.terminated:
        words = _filled(matcher)
        allowed = [
            t for t in range(VOCABULARY.size) if TABLE.holds(words, t) and t not in VOCABULARY.stop_ids
        ]
        if not allowed:
            break
        token = random.choice(_likely(matcher, allowed, random))
        while matcher.verifies and (left_out := matcher.veto(token)) is not None:
            allowed = [one for one in allowed if not TABLE.holds(left_out, one)]
            token = random.choice(allowed)
        assert matcher.accept(token)
        tokens.append(token)
        replayed = grammar.matcher(budget)
        assert replayed.feed(tokens) == len(tokens)
        assert _written(replayed) == _written(matcher), text_of(tokens, VOCABULARY)
        if matcher._plan is not None:
            probe = grammar.inner.matcher()
            assert probe.feed([*tokens, *matcher._plan.tokens]) == len(tokens) + len(matcher._plan.tokens)
            assert probe.accept(VOCABULARY.stop_ids[0]), text_of(tokens, VOCABULARY)


@pytest.mark.parametrize("name", SCHEMAS)
@settings(max_examples=10)
@given(st.randoms(use_true_random=False), st.integers(0, 6))
def test_what_is_left_out_beforehand_would_have_been_vetoed(
    name: str, random: random.Random, spare: int
) -> None:
    grammar = COMPILER.compile(GrammarSpec("json_schema", json.dumps(SCHEMAS[name])))
    matcher, inner = grammar.matcher(grammar.shortest + spare), grammar.inner.matcher()
    assert isinstance(matcher, BudgetMatcher)
    while matcher.verifies:
        words, plan = _filled(matcher), matcher._plan
        bitmask = np.zeros((1, TABLE.words), np.int32)
        inner.fill(bitmask, 0)
        left_out = bitmask[0].view(np.uint32) & ~words
        if plan is not None and plan.count < matcher._left:
            assert not left_out.any(), "a token can be spared"
        for token in range(VOCABULARY.size):
            if TABLE.holds(left_out, token) and not TABLE.holds(TABLE.stops, token):
                assert matcher.fork().veto(token) is not None, VOCABULARY.tokens[token]
        allowed = [token for token in range(VOCABULARY.size) if TABLE.holds(words, token)]
        while (refused := matcher.veto(token := random.choice(allowed))) is not None:
            allowed = [one for one in allowed if not TABLE.holds(refused, one)]
        assert matcher.accept(token)
        assert inner.accept(token)


def _likely(matcher: BudgetMatcher, allowed: list[int], random: random.Random) -> list[int]:
    """Mostly the plan's own next token, or one that is said to leave the plan as it is."""
    plan, classifier = matcher._plan, matcher._classifier
    if classifier is not None and random.random() < 0.5:
        return [token for token in allowed if classifier.written(token) is not None] or allowed
    if plan is not None and plan.first is not None and random.random() < 0.8:
        return [plan.first]
    return allowed


def _written(matcher: BudgetMatcher) -> Any:
    """What a matcher's plan writes, and how."""
    plan = matcher._plan
    return plan and (plan.piece, plan.tokens)


def _filled(matcher: BudgetMatcher) -> Any:
    bitmask = np.zeros((1, TABLE.words), np.int32)
    matcher.fill(bitmask, 0)
    return bitmask[0].view(np.uint32)


TEXTS: dict[str, Any] = SCHEMAS | {
    "lengths": {"type": "array", "items": {"type": "string", "minLength": 2, "maxLength": 12}, "minItems": 2},
    "names": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 5}},
    "listed": {"type": "array", "items": {"anyOf": [{"enum": ["the", "name"]}, {"type": "string"}]}},
}


_LONG_NUMBER = re.compile(rb"([0-9.eE+-]{9}|[0-9][eE][+-]?[0-9]*)$")


@pytest.mark.parametrize("name", TEXTS)
@settings(max_examples=8)
@given(st.randoms(use_true_random=False))
def test_a_mask_that_is_made_from_the_one_before_is_the_backends_own(
    name: str, random: random.Random
) -> None:
    grammar = COMPILER.compile(GrammarSpec("json_schema", json.dumps(TEXTS[name])))
    matcher, inner = grammar.matcher(5000), grammar.inner.matcher()
    assert isinstance(matcher, BudgetMatcher)
    text = b""
    for _ in range(60):
        if _LONG_NUMBER.search(text):
            break  # how long numbers may become is bounded here, and not by the backend
        words = _filled(matcher)
        bitmask = np.zeros((1, TABLE.words), np.int32)
        inner.fill(bitmask, 0)
        assert words.tolist() == bitmask[0].view(np.uint32).tolist()
        allowed = [
            t for t in range(VOCABULARY.size) if TABLE.holds(words, t) and t not in VOCABULARY.stop_ids
        ]
        if not allowed:
            break
        likely = [token for token in allowed if TABLE.holds(TABLE.plain(b""), token)]
        quotes = [
            token for token in allowed if VOCABULARY.tokens[token] in (b'"', b'{"', b'["', b',"', b'":"')
        ]
        token = random.choice(
            [random.choice(allowed), random.choice(likely or allowed), random.choice(quotes or allowed)]
        )
        assert matcher.accept(token)
        assert inner.accept(token)
        text += VOCABULARY.tokens[token]


def test_within_a_bounded_string_the_backend_is_asked_for_one_mask() -> None:
    grammar = COMPILER.compile(GrammarSpec("json_schema", json.dumps({"type": "string", "maxLength": 5})))
    matcher = grammar.matcher(500)
    matcher.feed([*b'"'])
    filled = []
    inner: Any = matcher._inner
    fill, inner.fill = inner.fill, lambda *where: filled.append(where) or fill(*where)
    for token in b"abc":
        words = _filled(matcher)
        assert TABLE.holds(words, token)
        matcher.accept(token)
    assert len(filled) == 1
    assert not TABLE.holds(_filled(matcher), VOCABULARY.tokens.index(b"the"))
    assert TABLE.holds(_filled(matcher), VOCABULARY.tokens.index(b"12"))
