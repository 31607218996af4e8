"""Whatever a model prefers, an answer that is bound is complete when its budget ends."""

import json
import random
from functools import cache
from typing import Any

import jsonschema_rs
import pytest
from grammar_walks import allowed_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from json_schemas import schemas
from sandbox_limits import PATIENT
from worst import WORST, answer, possible_tokens, text_of, text_vocabulary, veto

from personae.errors import GrammarError
from personae.grammar.budget.grammar import BudgetGrammar
from personae.grammar.budget.matcher import BudgetMatcher
from personae.grammar.budget.table import TokenTable
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.spec import GrammarSpec

VOCABULARY = text_vocabulary()
SPARE = (0, 3, 30)

STRING: dict[str, Any] = {"type": "string"}
CLOSED: dict[str, Any] = {"type": "object", "additionalProperties": False}
CASES: dict[str, Any] = {
    "anything": {},
    "object": {"type": "object"},
    "strings": {
        "type": "object",
        "properties": {"name": STRING, "motto": {"type": "string", "minLength": 20}, "more": STRING},
        "required": ["name", "motto"],
    },
    "limits": {
        "type": "array",
        "items": {"type": "string", "minLength": 3, "maxLength": 9},
        "minItems": 2,
        "maxItems": 40,
    },
    "tree": {
        "$defs": {
            "node": CLOSED
            | {
                "properties": {"value": {"type": "number"}, "next": {"$ref": "#/$defs/node"}, "last": STRING},
                "required": ["value", "last"],
            }
        },
        "$ref": "#/$defs/node",
    },
    "circle": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"not": {"$ref": "#/$defs/node"}, "id": STRING},
                "additionalProperties": {"$ref": "#/$defs/node"},
            }
        },
        "$ref": "#/$defs/node",
    },
    "kinds": {
        "anyOf": [
            CLOSED | {"properties": {"kind": {"const": "a"}, "x": STRING}, "required": ["kind", "x"]},
            CLOSED
            | {
                "properties": {"kind": {"const": "b"}, **{f"field_{n}": STRING for n in range(12)}},
                "required": ["kind", *(f"field_{n}" for n in range(12))],
            },
        ]
    },
    "patterns": CLOSED
    | {
        "properties": {
            "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}(-[a-z]+)?$"},
            "day": {"type": "string", "format": "date"},
            "key": {"type": "string", "format": "uuid"},
            "free": {"type": "string", "pattern": "end"},
        },
        "required": ["id", "day", "key", "free"],
    },
    "free formats": {
        "type": "object",
        "properties": {
            "mail": {"type": "string", "format": "email", "maxLength": 40},
            "at": {"type": "string", "format": "uri"},
        },
        "required": ["mail", "at"],
    },
    "multiples": {
        "type": "array",
        "items": {"type": "integer", "minimum": 1001, "multipleOf": 50},
        "minItems": 2,
    },
    "names that few may end": CLOSED
    | {"patternProperties": {"^\\w$": {"type": "object"}, "_meta": {"type": "null"}}, "minProperties": 1},
    "ends far from the beginning": CLOSED
    | {
        "properties": {
            "domain": {"type": "string", "pattern": "^([a-z0-9]+(-[a-z0-9]+)*\\.)+[a-z]{2,}$"},
            "layout": {"type": "string", "pattern": "^[A-Z0-9_]+(_CONTROLLER|_DEVICE|_LAYOUT)$"},
        },
        "required": ["domain", "layout"],
    },
    "optional circles": {
        "$defs": {
            "heading": CLOSED
            | {
                "properties": {
                    "headings": {"type": "array", "items": {"$ref": "#/$defs/heading"}, "minItems": 1},
                    "identity": STRING,
                },
                "required": ["identity"],
            }
        },
        **CLOSED,
        "properties": {"headings": {"type": "array", "items": {"$ref": "#/$defs/heading"}, "minItems": 1}},
        "required": ["headings"],
    },
    "choices": {"enum": ["a", "a much longer one", 12345678, None, {"deep": [1, 2, {"deeper": True}]}]},
    "numbers": {
        "type": "array",
        "prefixItems": [{"type": "integer", "minimum": 1000}, {"type": "number", "exclusiveMaximum": -0.25}],
        "items": {"type": "integer", "multipleOf": 7},
        "minItems": 4,
    },
    "open": {
        "type": "object",
        "patternProperties": {"^x-": {"type": "array", "items": {"type": "integer"}, "minItems": 3}},
        "additionalProperties": STRING,
        "required": ["x-a", "b"],
    },
    "unicode": {"type": "object", "properties": {"größe": {"const": "日本語"}}, "required": ["größe"]},
}


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(VOCABULARY, limits=PATIENT)


@cache
def compiled(kind: Any, source: str) -> BudgetGrammar:
    return compiler().compile_here(GrammarSpec(kind, source))


def schema_grammar(name: str) -> BudgetGrammar:
    return compiled("json_schema", json.dumps(CASES[name]))


def is_valid(schema: Any, text: bytes) -> bool:
    return jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(json.loads(text))


@pytest.mark.parametrize("prefer", WORST)
@pytest.mark.parametrize("name", CASES)
def test_a_schemas_answer_is_complete_and_valid_within_any_budget_from_the_shortest(
    name: str, prefer: str
) -> None:
    grammar = schema_grammar(name)
    for seed, spare in enumerate(SPARE):
        budget = grammar.shortest + spare
        tokens = answer(grammar.matcher(budget), VOCABULARY, WORST[prefer], budget, seed)
        text = text_of(tokens, VOCABULARY)
        assert is_valid(CASES[name], text), f"{budget} tokens: {text!r}"


@settings(max_examples=30)
@given(schemas(), st.sampled_from(sorted(WORST)), st.integers(0, 80), st.integers(0, 99))
def test_any_schemas_answer_is_complete_and_valid(
    schema: dict[str, Any], prefer: str, spare: int, seed: int
) -> None:
    try:
        grammar = compiler().compile(GrammarSpec("json_schema", json.dumps(schema)))
    except GrammarError:
        return
    budget = grammar.shortest + spare
    text = text_of(answer(grammar.matcher(budget), VOCABULARY, WORST[prefer], budget, seed), VOCABULARY)
    assert is_valid(schema, text), f"{budget} tokens: {text!r}"


@pytest.mark.parametrize(
    ("kind", "source", "whole"),
    [
        ("json_object", "", lambda text: isinstance(json.loads(text), dict)),
        ("choice", '["yes", "no", "it is not known to anyone"]', lambda text: text in (b"yes", b"no")),
        ("regex", "[a-c]{2,30}(-[0-9]{3}){1,9}", lambda text: text.count(b"-") and len(text) > 5),
        ("lark", 'start: "(" start ")" | /[a-z]+/', lambda text: text.count(b"(") == text.count(b")")),
        ("ebnf", 'root ::= "[" [a-z]* "]" | "[" root "]"', lambda text: text.count(b"[") == text.count(b"]")),
    ],
)
@pytest.mark.parametrize("prefer", WORST)
def test_answers_of_other_kinds_close_as_well(kind: str, source: str, whole: Any, prefer: str) -> None:
    grammar = compiled(kind, source)
    for seed, spare in enumerate((0, 1, 3, 40)):
        budget = grammar.shortest + spare
        tokens = answer(grammar.matcher(budget), VOCABULARY, WORST[prefer], budget, seed)
        text = text_of(tokens, VOCABULARY)
        matcher = grammar.matcher()
        assert matcher.feed(tokens) == len(tokens)
        assert matcher.accept(VOCABULARY.stop_ids[0]), f"{text!r} breaks off"
        assert whole(text) or kind == "choice", text


def test_a_choice_that_no_longer_fits_is_not_begun() -> None:
    grammar = compiled("choice", '["yes", "no", "it is not known to anyone"]')
    assert grammar.shortest == 2
    matcher = grammar.matcher(3)
    assert {VOCABULARY.tokens[token] for token in possible_tokens(matcher, VOCABULARY)} == {b"y", b"n"}


@pytest.mark.parametrize("name", ["kinds", "tree", "patterns", "strings"])
def test_a_matcher_that_replays_a_log_narrows_as_the_first_one_did(name: str) -> None:
    grammar = schema_grammar(name)
    budget = grammar.shortest + 25
    tokens = answer(grammar.matcher(budget), VOCABULARY, WORST["members"], budget, 3)
    first = grammar.matcher(budget)
    for count, token in enumerate(tokens):
        allowed = possible_tokens(first, VOCABULARY)
        if count % 5 == 0:
            replayed = grammar.matcher(budget)
            assert replayed.feed(tokens[:count]) == count
            assert possible_tokens(replayed, VOCABULARY) == allowed
            forked = first.fork()
            here = forked.snapshot()
            assert forked.accept(token)
            forked.restore(here)
            assert possible_tokens(forked, VOCABULARY) == allowed
        first.accept(token)


def test_far_from_its_end_an_answer_is_not_searched_for_one() -> None:
    grammar = schema_grammar("strings")
    matcher = grammar.matcher(5000)
    assert isinstance(matcher, BudgetMatcher)
    plain = grammar.matcher()
    rng = random.Random(1)
    for _ in range(60):
        allowed = allowed_tokens(matcher, VOCABULARY)
        assert allowed == allowed_tokens(plain, VOCABULARY)
        token = rng.choice([token for token in allowed if token not in VOCABULARY.stop_ids] or allowed)
        matcher.accept(token)
        plain.accept(token)
    assert not matcher.searched


def test_near_its_end_a_string_may_still_be_any_text() -> None:
    matcher = schema_grammar("strings").matcher(60)
    matcher.feed([*b'{"name":"'])
    words = {VOCABULARY.tokens[token] for token in possible_tokens(matcher, VOCABULARY)}
    assert {b"the", b" quick", b"a" * 8, "日本".encode(), b'"'} <= words


def test_near_its_end_an_answer_is_what_the_model_says_as_long_as_it_fits() -> None:
    """Asked about one token after the other, as in `Sampler`: no other token is put in its place."""
    grammar = schema_grammar("kinds")
    said = b'{"kind":"a","x":"the quick brown fox"}'
    matcher = grammar.matcher(len(said))
    for token in said:
        assert token in allowed_tokens(matcher, VOCABULARY)
        assert veto(matcher, token) is None
        assert matcher.accept(token)
    assert set(possible_tokens(matcher, VOCABULARY)) == set(VOCABULARY.stop_ids)


def test_after_a_few_objections_only_what_is_sure_is_left() -> None:
    matcher = schema_grammar("strings").matcher(schema_grammar("strings").shortest)
    left = set(allowed_tokens(matcher, VOCABULARY))
    asked = 0
    while (worst := min(left)) is not None and (words := veto(matcher, worst)) is not None:
        left = {token for token in left if not TokenTable.holds(words, token)}
        asked += 1
    assert asked <= 9
    assert matcher.accept(worst)


def test_the_shortest_answer_counts_the_tokens_that_write_it() -> None:
    grammar = compiled("json_schema", '{"type":"object","properties":{"a":{"const":"the"}},"required":["a"]}')
    assert grammar.shortest_plan is not None
    assert text_of(grammar.shortest_plan.tokens, VOCABULARY) == b'{"a":"the"}'
    assert grammar.shortest == len([b'{"a":', b'"', b"the", b'"}'])


# Its automaton is past the library's limits after a few tokens of a text.
GROWING = {
    "type": "string",
    "minLength": 10,
    "maxLength": 90,
    "allOf": [{"pattern": p} for p in (".*1.*2", "[aA][12].*[zZ]", "[0-9][0-9]", "ab1|b12|bc1")],
}


@pytest.mark.parametrize("spare", [0, 40])
def test_where_the_backend_gives_up_the_answer_goes_on_to_its_end_as_planned(spare: int) -> None:
    grammar = GrammarCompiler(VOCABULARY, sandboxed=False).compile(
        GrammarSpec("json_schema", json.dumps(GROWING))
    )
    budget = grammar.shortest + spare
    matcher = grammar.matcher(budget)
    tokens = answer(matcher, VOCABULARY, WORST["long"], budget, 1)
    text = text_of(tokens, VOCABULARY)
    assert is_valid(GROWING, text)
    here = matcher.snapshot()
    assert matcher.accept(256)
    assert matcher.terminated
    matcher.restore(here)
    other = matcher.fork()
    for one in (matcher, other):
        assert one.accept(256)
        assert one.terminated


def test_a_schema_no_answer_to_which_is_found_is_refused_or_bound_by_its_type_alone() -> None:
    multiples = [{"multipleOf": step} for step in (6.75, 19, 9.5, 2.125)]
    schema = {"type": "number", "allOf": multiples, "exclusiveMinimum": -1e5, "exclusiveMaximum": -1e4}
    with pytest.raises(GrammarError) as refused:
        compiled("json_schema", json.dumps(schema))
    assert refused.value.code == "grammar_too_complex"
    loose = compiler().compile(GrammarSpec("json_schema", json.dumps(schema), strict=False))
    assert isinstance(
        json.loads(text_of(answer(loose.matcher(9), VOCABULARY, len, 9, 0), VOCABULARY)), float | int
    )


@pytest.mark.parametrize("schema", [{"type": "number"}, {"type": "integer"}, {}])
def test_numbers_have_no_more_characters_than_a_double_needs(schema: dict[str, Any]) -> None:
    grammar = compiled("json_schema", json.dumps(schema))
    for seed in range(5):
        matcher = grammar.matcher(5000)
        matcher.accept(ord("1"))
        text = b"1" + text_of(answer(matcher, VOCABULARY, WORST["digits"], 300, seed), VOCABULARY)
        assert len(text) <= 27
        assert abs(float(text)) < float("inf")


def test_a_string_of_digits_may_be_long() -> None:
    matcher = compiled("json_schema", '{"type":"string","pattern":"^[0-9]{300}$"}').matcher(5000)
    assert matcher.feed([*b'"' + b"7" * 300 + b'"']) == 302
    free = compiled("json_schema", '{"type":"string"}').matcher(5000)
    free.feed([*b'"' + b"7" * 100])
    assert ord("7") in allowed_tokens(free, VOCABULARY)
