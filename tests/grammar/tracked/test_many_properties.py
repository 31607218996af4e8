"""Objects with more properties than there are bits come in any order too, and no property comes twice."""

import json
import random
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from byte_bpe import byte_level_vocabulary
from grammar_walks import walk
from worst import WORST, answer, text_of, text_vocabulary

from personae.evals.suites.maskbench import byte_vocabulary
from personae.grammar.backend import BoundGrammar
from personae.grammar.bitmask import words_of
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.sandbox.masks import RemoteGrammar
from personae.grammar.spec import GrammarSpec
from personae.grammar.tracked.listed_names import ListedNames, beginning

NUMBER, TEXT = {"type": "integer", "minimum": 0, "maximum": 9}, {"enum": ["", "a,b", '"},']}
NAMES = [*(f"p{place}" for place in range(76)), "colour", "colours", "é"]
MANY: dict[str, Any] = {
    "type": "object",
    "properties": {**dict.fromkeys(NAMES, NUMBER), "text": TEXT},
    "required": ["p3", "p70"],
}
CLOSED = MANY | {"additionalProperties": False}
WITHIN = {
    "type": "object",
    "properties": {"b": {"type": "boolean"}, "many": CLOSED},
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "open": MANY,
    "closed": CLOSED,
    "closed, with a member that is an object": {
        **CLOSED,
        "properties": {**CLOSED["properties"], "inner": {"type": "object", "properties": {"p1": NUMBER}}},
    },
    "within an object": WITHIN,
    "dependent": CLOSED | {"dependentRequired": {"p1": ["p2"], "colour": ["text"]}},
    "typed others": MANY | {"additionalProperties": {"type": "boolean"}},
    "others that begin in certain ways": {
        **CLOSED,
        "patternProperties": {"^colours-": NUMBER, "^x:.*": {"type": "boolean"}, r"^p\.": NUMBER},
    },
    "one barred": {**CLOSED, "properties": {**CLOSED["properties"], "p9": False}},
}
WORDS = [
    '","p',
    ',"p',
    ',"c',
    '"p1',
    '":1,"',
    '1,"',
    "1,",
    '",',
    "}}",
    '},"',
    '{"',
    '"text":"',
    '"p70":1,',
    "p70",
    ',"',
]
VOCABULARY = byte_vocabulary(WORDS)


@cache
def compiler(kind: str) -> GrammarCompiler:
    vocabularies = {"bytes": byte_vocabulary, "text": text_vocabulary, "walk": byte_level_vocabulary}
    made = VOCABULARY if kind == "words" else vocabularies[kind]()
    return GrammarCompiler(made, sandboxed=False)


@cache
def compiled(name: str, kind: str = "bytes") -> BoundGrammar:
    spec = GrammarSpec("json_schema", json.dumps(SCHEMAS[name]), any_order=True)
    grammar = compiler(kind).compile(spec)
    assert not isinstance(grammar, RemoteGrammar)
    return grammar


def accepts(grammar: BoundGrammar, text: str) -> bool:
    matcher = grammar.matcher()
    return matcher.feed(text.encode()) == len(text.encode()) and matcher.accept(256)


def written(members: list[tuple[str, Any]]) -> str:
    return (
        "{"
        + ",".join(f"{json.dumps(name, ensure_ascii=False)}:{json.dumps(one)}" for name, one in members)
        + "}"
    )


TYPICAL = {"text": "a,b", "other": True, "x:": True, "x:p": False}


@pytest.mark.parametrize("name", [name for name in SCHEMAS if name != "within an object"])
def test_objects_in_random_order_are_accepted_as_jsonschema_says(name: str) -> None:
    judge, rng, outcomes = jsonschema.Draft202012Validator(SCHEMAS[name]), random.Random(7), set()
    for count in [*range(8), 30, 79, 80]:
        for _ in range(4):
            all_names = [*NAMES, "text", "other", "x:", "x:p", "colours-1", "p.1", "x"]
            names = rng.sample(all_names, min(count, len(NAMES) + 2))
            if rng.random() < 0.6:
                names = [*dict.fromkeys([*names, "p70", "p3"])]
            value = {one: TYPICAL.get(one, 1) for one in names}
            outcomes.add(judge.is_valid(value))
            assert accepts(compiled(name), written([*value.items()])) == judge.is_valid(value), value
    assert outcomes == {False, True}


@pytest.mark.parametrize("name", ["open", "closed", "dependent", "others that begin in certain ways"])
def test_no_property_is_written_twice(name: str) -> None:
    members: list[tuple[str, Any]] = [("p70", 1), ("colour", 2), ("é", 3), ("p3", 4), ("text", "")]
    assert accepts(compiled(name), written(members))
    for again in members:
        assert not accepts(compiled(name), written([*members, again])), again


# Where names are free it would have to find those of the required properties by chance.
FREE = ("open", "typed others", "others that begin in certain ways")


@pytest.mark.parametrize("name", [name for name in SCHEMAS if name not in FREE])
def test_a_random_walk_never_gets_stuck_and_ends_in_a_valid_object(name: str) -> None:
    for seed in range(3):
        rng = random.Random(seed)
        text = walk(compiled(name, "walk").matcher(), byte_level_vocabulary(), rng, budget=150)
        jsonschema.validate(json.loads(text, object_pairs_hook=once), SCHEMAS[name])


@pytest.mark.parametrize("name", ["open", "closed", "others that begin in certain ways"])
@pytest.mark.parametrize("prefer", WORST)
def test_an_object_closes_within_its_budget_whatever_the_model_prefers(name: str, prefer: str) -> None:
    grammar = compiled(name, "text")
    for room in (0, 40):
        budget = grammar.shortest + room
        text = text_of(
            answer(grammar.matcher(budget), compiler("text").vocabulary, WORST[prefer], budget, room),
            text_vocabulary(),
        )
        jsonschema.validate(json.loads(text, object_pairs_hook=once), SCHEMAS[name])


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def all_but(*left: str) -> str:
    return written([(one, "" if one == "text" else 1) for one in (*NAMES, "text") if one not in left])[:-1]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"p70":1',
        '{"p70":1,',
        '{"p70":1,"p7',
        '{"colour":1,"col',
        '{"colours":1,"colour',
        all_but("p70"),
        all_but("p70") + ",",
        all_but("p70") + ',"p7',
        all_but("p70", "colour") + ',"',
        all_but("text") + ',"text":',
        all_but("text") + ',"text":"',
        all_but("p5") + ',"p5":',
        all_but(),
    ],
)
@pytest.mark.parametrize("name", ["closed", "within an object", "others that begin in certain ways"])
def test_a_mask_allows_what_is_accepted_and_leads_to_an_end(text: str, name: str) -> None:
    text = '{"many":' + text if name == "within an object" else text
    matcher = compiled(name, "words").matcher()
    assert matcher.feed(text.encode()) == len(text.encode())
    mask = np.zeros((1, words_of(VOCABULARY.size)), np.int32)
    matcher.fill(mask, 0)
    allowed = [token for token in range(VOCABULARY.size) if mask[0, token // 32] >> token % 32 & 1]
    assert allowed
    for token in allowed:
        snapshot = matcher.snapshot()
        assert matcher.accept(token), VOCABULARY.tokens[token]
        matcher.fill(mask, 0)
        assert mask.any(), f"nothing may follow {VOCABULARY.tokens[token]!r}"
        matcher.restore(snapshot)
    assert {token for token in range(256) if matcher.follows([token]) == 1} <= set(allowed)


def test_after_the_last_name_no_comma_is_allowed() -> None:
    matcher = compiled("closed").matcher()
    text = all_but().encode()
    assert matcher.feed(text) == len(text)
    assert matcher.follows(b",") == 0
    assert matcher.feed(b"}") == 1


@pytest.mark.parametrize(
    ("begun", "seen", "barred"),
    [
        ("", {"ab", "ac"}, {"a"}),
        ("", {"ab"}, {"ab"}),
        ("a", {"ab"}, {"b"}),
        ("", {"b"}, {'b"'}),
        ("b", {"bc"}, {"c"}),
        ("", {"ab", "ac", "b", "bc"}, {"a", "b"}),
    ],
)
def test_a_name_that_is_there_is_barred_where_it_parts_from_those_that_are_left(
    begun: str, seen: set[str], barred: set[str]
) -> None:
    names = ListedNames(frozenset({b"ab", b"ac", b"b", b"bc", b"d"}))
    there = frozenset(one.encode() for one in seen)
    assert {*names.barred(begun.encode(), there)} == {one.encode() for one in barred}


@pytest.mark.parametrize(
    ("begun", "seen", "barred"),
    [
        ("", {"ab"}, {"ab"}),
        ("", {"x-1"}, {'x-1"'}),
        ("x", {"x-1", "xy"}, {'-1"', "y"}),
        ("x-", {"x-"}, {'"'}),
        ("", {"xy"}, {"xy"}),
    ],
)
def test_a_name_is_barred_where_it_parts_from_the_beginning_of_others(
    begun: str, seen: set[str], barred: set[str]
) -> None:
    names = ListedNames(frozenset({b"ab", b"ac", b"xy", b"x-"}), frozenset({b"x-"}))
    there = frozenset(one.encode() for one in seen)
    assert {*names.barred(begun.encode(), there)} == {one.encode() for one in barred}
    assert names.allows(b"x", there)
    assert names.left(there) > 1


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("^x-", "x-"),
        ("^a_.*", "a_"),
        (r"^a\.b", "a.b"),
        ("^a.b", None),
        ("a", None),
        ("^a$", None),
        ("^a|b", None),
    ],
)
def test_the_beginning_of_names_is_known_if_it_is_all_that_a_pattern_says(
    pattern: str, text: str | None
) -> None:
    assert beginning(pattern) == text
