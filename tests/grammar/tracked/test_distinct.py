"""Sets of numbers, bounded strings, objects and values of any type: no item is there twice, and there is
always a way to the end."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from byte_bpe import byte_level_vocabulary
from grammar_walks import walk
from hypothesis import given, settings
from hypothesis import strategies as st
from worst import WORST, answer, text_of, text_vocabulary

from personae.errors import GrammarError
from personae.evals.suites.maskbench import byte_vocabulary
from personae.grammar.bitmask import allows, words_of
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.spec import GrammarSpec
from personae.grammar.tracked.endings import Endings
from personae.grammar.tracked.numerals import fractions, integers

COMPILER = GrammarCompiler(byte_vocabulary(), sandboxed=False)
WALKER = GrammarCompiler(byte_level_vocabulary(), sandboxed=False)
WIDER = text_vocabulary()
ADVERSE = GrammarCompiler(WIDER, sandboxed=False)
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
        [[{"x": 1, "kind": "a"}, {"x": 1, "kind": "a", "y": None}]],
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


def set_of(items: Any, **others: Any) -> dict[str, Any]:
    return {"type": "array", "uniqueItems": True, "items": items, **others}


def accepted(grammar: Any, text: str) -> bool:
    matcher = grammar.matcher()
    return matcher.feed(text.encode()) == len(text.encode()) and matcher.accept(256)


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


@pytest.mark.parametrize("name", ITEMS)
def test_sets_are_accepted_as_jsonschema_says(name: str) -> None:
    items, valid, invalid = ITEMS[name]
    schema = set_of(items)
    grammar = COMPILER.compile(GrammarSpec("json_schema", json.dumps(schema)))
    judge = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    for one in valid:
        assert judge.is_valid(one)
        assert accepted(grammar, compact(one)), one
    for one in invalid:
        assert not judge.is_valid(one)
        assert not accepted(grammar, compact(one)), one
        assert not accepted(grammar, "[ " + " , ".join(map(compact, one)) + " ]")


def turned(value: Any) -> Any:
    """The value with the properties of all objects in reversed order."""
    if isinstance(value, dict):
        return {name: turned(one) for name, one in reversed(value.items())}
    return [turned(one) for one in value] if isinstance(value, list) else value


FREE = ["objects", "open objects", "two kinds of objects", "objects with one of thousands of texts"]


@pytest.mark.parametrize("name", ITEMS)
def test_in_any_order_no_item_comes_again_with_its_properties_in_another_order(name: str) -> None:
    items, valid, invalid = ITEMS[name]
    grammar = COMPILER.compile(GrammarSpec("json_schema", json.dumps(set_of(items)), any_order=True))
    for one in valid:
        assert accepted(grammar, compact(one)), one
        if name in FREE:
            assert accepted(grammar, compact(turned(one))), one
            mixed = [turned(item) if place % 2 else item for place, item in enumerate(one)]
            assert accepted(grammar, compact(mixed)), one
    for one in invalid:
        for place in range(len(one) + 1):
            assert not accepted(grammar, compact([*one[:place], *map(turned, one[place:])])), one


@pytest.mark.parametrize("prefer", WORST)
@pytest.mark.parametrize("name", FREE)
def test_in_any_order_a_set_closes_within_its_budget_and_is_valid(name: str, prefer: str) -> None:
    schema = within_an_object(name)
    grammar = ADVERSE.compile(GrammarSpec("json_schema", json.dumps(schema), any_order=True))
    for room in (0, 12):
        budget = grammar.shortest + room
        text = text_of(answer(grammar.matcher(budget), WIDER, WORST[prefer], budget, room), WIDER)
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("name", FREE)
def test_in_any_order_a_random_walk_ends_in_a_valid_set(name: str) -> None:
    schema = within_an_object(name)
    grammar = WALKER.compile(GrammarSpec("json_schema", json.dumps(schema), any_order=True))
    for seed in range(12):
        text = walk(grammar.matcher(), byte_level_vocabulary(), random.Random(seed), budget=40)
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


def test_in_any_order_items_of_many_properties_and_of_few_values_keep_theirs() -> None:
    many = {"type": "object", "properties": {name: {"type": "integer"} for name in "abcde"}}
    few = {"type": "object", "properties": {name: {"type": "boolean"} for name in "ab"}}
    closed = {"additionalProperties": False}
    for items, item in ((many | closed, {"a": 1, "b": 1}), (few | closed, {"a": True, "b": True})):
        grammar = COMPILER.compile(GrammarSpec("json_schema", json.dumps(set_of(items)), any_order=True))
        assert accepted(grammar, compact([item]))
        assert not accepted(grammar, compact([turned(item)]))


def within_an_object(name: str) -> dict[str, Any]:
    properties = {"s": set_of(ITEMS[name][0], minItems=3)}
    return {"type": "object", "properties": properties, "required": ["s"], "additionalProperties": False}


@pytest.mark.parametrize("name", ITEMS)
def test_a_random_walk_never_gets_stuck_and_ends_in_a_valid_set(name: str) -> None:
    schema = within_an_object(name)
    grammar = WALKER.compile(GrammarSpec("json_schema", json.dumps(schema)))
    for seed in range(6):
        text = walk(grammar.matcher(), byte_level_vocabulary(), random.Random(seed), budget=20)
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("name", ITEMS)
@pytest.mark.parametrize("prefer", WORST)
def test_a_set_closes_within_its_budget_whatever_the_model_prefers(name: str, prefer: str) -> None:
    schema = within_an_object(name)
    grammar = ADVERSE.compile(GrammarSpec("json_schema", json.dumps(schema)))
    for room in (0, 3, 12):
        budget = grammar.shortest + room
        tokens = answer(grammar.matcher(budget), WIDER, WORST[prefer], budget, room)
        text = text_of(tokens, WIDER)
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("size", [4, 5])
def test_few_values_are_all_used_and_no_more_begin(size: int) -> None:
    few = {"type": "string", "pattern": "^(a|ab|b|ba)$"}
    spec = GrammarSpec("json_schema", json.dumps(set_of(few, minItems=size)))
    if size == 5:
        with pytest.raises(GrammarError):
            COMPILER.compile_here(spec)
        return
    grammar = COMPILER.compile(spec)
    assert sorted(json.loads(bytes(grammar.shortest_plan.piece))) == ["a", "ab", "b", "ba"]
    assert accepted(grammar, '["a","b","ba","ab"]')
    matcher = grammar.matcher()
    assert matcher.feed(b'["ab","b","a","ba"') == 18
    assert not matcher.accept(ord(","))
    assert matcher.accept(ord("]"))


WORDS = [
    *(
        '"',
        '",',
        '","',
        '["',
        '"a"',
        '"]',
        ',"',
        '"a","b"',
        "1",
        "12",
        "1,",
        ",1",
        "1]",
        " 1",
        "1,1",
        "[1",
        "[1,1",
    ),
    *(
        "},",
        "},{",
        "}]",
        '{"a":',
        '":1}',
        '":1},',
        ',"b":',
        "],[",
        "]]",
        " ,",
        ", ",
        "[]",
        "true",
        "true,",
        ",true",
    ),
]
VOCABULARY = byte_vocabulary(WORDS)
TOKENS = GrammarCompiler(VOCABULARY, sandboxed=False)


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ({"type": "integer"}, "[1,2"),
        ({"type": "integer"}, "[1,12, "),
        ({"type": "integer"}, "[1,12,1"),
        ({"type": "integer"}, "["),
        ({"type": "integer"}, "[1 "),
        (True, '[1,"a",'),
        (True, '[true,[1],{"a":1},'),
        (True, '[true,[1],{"a":1},{"a":'),
        (True, '[true,[1],{"a":1},{"a":1'),
        ({"type": "boolean"}, "[true,"),
        ({"type": "string", "pattern": "^(a|b)$"}, '["a",'),
        ({"type": "string", "pattern": "^(a|b)$"}, '["a","'),
        ({"type": "string", "pattern": "^(a|b)$"}, '["a","b'),
        ({"type": "string", "maxLength": 2}, '["a","1","'),
        (set_of({"type": "string"}), '[["a"],["a"'),
        (set_of({"type": "string"}), '[["a","b"],["a","b'),
        (set_of({"type": "string"}), '[["a","b"],["a","'),
        (set_of({"type": "integer"}), "[[1,2],[1,2"),
        (set_of({"type": "integer"}), "[[1,2],[1,1"),
    ],
)
def test_a_mask_allows_only_what_is_accepted(items: Any, text: str) -> None:
    for schema in (set_of(items), {"type": "array", "items": set_of(items)}):
        nested = "[" if schema["items"] is not items else ""
        matcher = TOKENS.compile(GrammarSpec("json_schema", json.dumps(schema))).matcher()
        assert matcher.feed((nested + text).encode()) == len(nested + text)
        mask = np.zeros((1, words_of(VOCABULARY.size)), np.int32)
        matcher.fill(mask, 0)
        allowed = [token for token in range(VOCABULARY.size) if mask[0, token // 32] >> token % 32 & 1]
        assert allowed
        for token in allowed:
            snapshot = matcher.snapshot()
            assert matcher.follows([token]) == 1, VOCABULARY.tokens[token]
            assert matcher.accept(token), VOCABULARY.tokens[token]
            matcher.restore(snapshot)
        single = {token for token in range(256) if matcher.follows([token]) == 1}
        assert single <= set(allowed)


def test_what_is_taken_back_is_forgotten() -> None:
    matcher = COMPILER.compile(GrammarSpec("json_schema", json.dumps(set_of({"type": "integer"})))).matcher()
    assert matcher.feed(b"[1,") == 3
    snapshot = matcher.snapshot()
    assert matcher.feed(b"2,3") == 3
    matcher.restore(snapshot)
    assert matcher.fork().feed(b"2,3,1]") == 5
    assert matcher.feed(b"2,3]") == 4


@pytest.mark.parametrize(
    "items",
    [
        {"type": "object"},
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
        {"type": "number", "minimum": 0.5},
        {"type": "integer", "multipleOf": 7},
        {"type": "array", "uniqueItems": True},
        {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}},
    ],
)
def test_sets_whose_items_have_several_spellings_are_refused_by_name(items: dict[str, Any]) -> None:
    with pytest.raises(
        GrammarError, match=r"'(uniqueItems|items|multipleOf|minimum|patternProperties)' at #/"
    ):
        COMPILER.compile_here(GrammarSpec("json_schema", json.dumps(set_of(items))))


def test_a_place_where_an_array_may_be_a_set_or_not_is_refused() -> None:
    """A matcher reads along and does not know which alternative the grammar is in."""
    numbers = set_of({"type": "integer"})
    schema = {
        "anyOf": [
            {"type": "object", "properties": {"k": {"const": 1}, "v": numbers}, "required": ["k", "v"]},
            {
                "type": "object",
                "properties": {
                    "k": {"const": 2},
                    "v": {"type": "array", "items": {"const": 1}, "minItems": 2},
                },
                "required": ["k", "v"],
            },
        ]
    }
    with pytest.raises(GrammarError, match="cannot be enforced"):
        COMPILER.compile_here(GrammarSpec("json_schema", json.dumps(schema)))


@given(
    st.one_of(st.none(), st.integers(-2000, 2000)),
    st.one_of(st.none(), st.integers(-2000, 2000)),
    st.lists(
        st.one_of(st.integers(-2200, 2200), st.integers(-22000, 22000).map(lambda n: n / 10)), max_size=30
    ),
)
@settings(max_examples=150, deadline=None)
def test_expressions_for_numbers_match_those_within_their_bounds(
    low: int | None, high: int | None, numbers: list[float]
) -> None:
    import re

    whole, broken = integers(low, high), fractions(low, high)
    for number in [*numbers, *(one for one in (low, high) if one is not None)]:
        inside = (low is None or number >= low) and (high is None or number <= high)
        text = str(int(number)) if float(number).is_integer() else str(number)
        pattern = whole if float(number).is_integer() else broken
        assert bool(pattern and re.fullmatch(pattern, text)) is inside, (low, high, text)
    for pattern in filter(None, (whole, broken)):
        assert not any(
            re.fullmatch(pattern, odd) for odd in ("-0", "01", "1.0", "1.50", "1e3", "", "-", ".5", "-0.0")
        )


@pytest.mark.parametrize("schema", [{"type": "integer"}, {"type": "string"}, POINT])
def test_a_mask_looks_up_no_more_tokens_in_a_set_of_hundreds_of_items(monkeypatch, schema) -> None:
    looked_up = []
    for name in ("beginning", "beginning_string"):
        find = getattr(Endings, name)

        def counted(self, *arguments, find=find):
            looked_up.append(arguments)
            return find(self, *arguments)

        monkeypatch.setattr(Endings, name, counted)
    items: list[Any] = list(range(100))
    if schema is POINT:
        items = [{"x": number, "kind": "a"} for number in items]
    elif schema == {"type": "string"}:
        items = [str(number) for number in items]
    document = json.dumps({"type": "array", "uniqueItems": True, "items": schema})
    spec = GrammarSpec("json_schema", document, strict=True)
    text = json.dumps(items, separators=(",", ":"))[:-1] + ","
    matcher = COMPILER.compile(spec).matcher(100_000)
    mask = np.zeros((1, words_of(COMPILER.vocabulary.size)), np.int32)
    most = []
    for byte in text.encode():
        looked_up.clear()
        matcher.fill(mask, 0)
        most.append(len(looked_up))
        assert matcher.accept(byte)
    assert max(most[-200:]) <= max(most[:200])


def test_an_item_looks_up_few_tokens_although_a_large_part_of_the_vocabulary_begins_with_a_blank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    find = Endings.beginning

    def counted(self: Endings, text: bytes, after_blanks: bool) -> Any:
        tokens = find(self, text, after_blanks)
        found.append(len(tokens))
        return tokens

    monkeypatch.setattr(Endings, "beginning", counted)
    vocabulary = byte_vocabulary([f" word{number}" for number in range(5_000)])
    spec = GrammarSpec("json_schema", json.dumps(set_of({"type": "integer"})), strict=True)
    matcher = GrammarCompiler(vocabulary, sandboxed=False).compile(spec).matcher(1_000)
    mask = np.zeros((1, words_of(vocabulary.size)), np.int32)
    for byte in b"[12,7,345,1":
        matcher.fill(mask, 0)
        assert matcher.accept(byte)
    assert sum(found) < 200
    assert matcher.accept(ord("2"))
    matcher.fill(mask, 0)
    assert not any(allows(mask[0], token) for token in (*b", ]", 256))
    assert allows(mask[0], ord("3"))
