"""Schemas that no grammar enforces: each token is checked, and every answer is valid."""

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from grammar_walks import accepts, allowed_tokens
from patience import eventually
from sandbox_limits import PATIENT
from worst import WORST, answer, text_of, text_vocabulary

from personae.errors import GrammarError
from personae.evals.hostile import SCHEMAS as HOSTILE
from personae.grammar.bitmask import allows, words_of
from personae.grammar.budget.planner import Planner
from personae.grammar.budget.table import TokenTable
from personae.grammar.checked.compile import Loosening
from personae.grammar.checked.grammar import CheckedGrammar
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.registry import make_backend
from personae.grammar.sandbox.masks import UNDECIDED, RemoteGrammar
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.elements import Json

VOCABULARY = text_vocabulary()
COMPILER = GrammarCompiler(VOCABULARY, sandboxed=False)

SCHEMAS: dict[str, dict[str, Any]] = {
    "a set of objects": {
        "type": "array",
        "items": {"type": "object", "properties": {"k": {"type": "boolean"}, "n": {"type": "integer"}}},
        "uniqueItems": True,
    },
    "a set of tuples": {"type": "array", "prefixItems": [{"type": "integer"}], "uniqueItems": True},
    "a repeated group": {"type": "string", "pattern": r"^(a|b)\1$"},
    "overlapping branches": {"type": "number", "oneOf": [{"type": "integer"}, {"minimum": 2.5}]},
    "a condition on a number": {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "big": {"type": "boolean"}},
        "required": ["n", "big"],
        "additionalProperties": False,
        "if": {"properties": {"n": {"multipleOf": 7}}},
        "then": {"properties": {"big": {"const": True}}},
        "else": {"properties": {"big": {"const": False}}},
    },
    "names that match two patterns": {
        "type": "object",
        "patternProperties": {"^a": {"type": ["integer", "string"]}, "z$": {"type": ["string", "null"]}},
        "additionalProperties": False,
        "minProperties": 1,
    },
}


def checked(schema: Any) -> CheckedGrammar:
    spec = GrammarSpec("json_schema", json.dumps(schema), checked=True)
    grammar = COMPILER.compile_here(spec)
    assert isinstance(grammar, CheckedGrammar)
    return grammar


@pytest.mark.parametrize("prefer", WORST.values(), ids=WORST)
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_every_answer_is_valid_and_ends_within_its_budget(schema: Any, prefer: Any) -> None:
    grammar = checked(schema)
    for seed, budget in enumerate((grammar.shortest, grammar.shortest + 3, grammar.shortest + 24)):
        tokens = answer(grammar.matcher(budget), VOCABULARY, prefer, budget, seed)
        value = json.loads(text_of(tokens, VOCABULARY))
        assert jsonschema.Draft202012Validator(schema).is_valid(value), value


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("a set of objects", [[], [{"k": True}, {"k": False}]], [[{"k": True}, {"k": True}], [{}, {}]]),
        ("a set of tuples", [[1, "a", [2]], [3]], [[1, 1], [1, "a", "a"]]),
        ("a repeated group", ["aa", "bb"], ["ab", "a", "aaa"]),
        ("overlapping branches", [2, 2.75], [3, 2.25]),
        (
            "a condition on a number",
            [{"n": 14, "big": True}, {"n": 13, "big": False}],
            [{"n": 14, "big": False}, {"n": 13, "big": True}],
        ),
        (
            "names that match two patterns",
            [{"a": 1}, {"az": "x"}, {"z": None}],
            [{"az": 1}, {"az": None}, {"b": 1}, {}],
        ),
    ],
)
def test_valid_answers_are_accepted_and_invalid_ones_are_not(
    name: str, valid: list[Any], invalid: list[Any]
) -> None:
    grammar = checked(SCHEMAS[name])
    for value, expected in (*((one, True) for one in valid), *((one, False) for one in invalid)):
        text = json.dumps(value, separators=(",", ":")).encode()
        assert accepts(grammar.matcher(), VOCABULARY, text) is expected, value
        assert jsonschema.Draft202012Validator(SCHEMAS[name]).is_valid(value) is expected


def test_a_name_that_comes_twice_is_not_accepted() -> None:
    grammar = checked({"type": "object", "not": {"required": ["b"]}})
    assert accepts(grammar.matcher(), VOCABULARY, b'{"a":1,"c":1}')
    assert not accepts(grammar.matcher(), VOCABULARY, b'{"a":1,"a":1}')


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_a_matcher_that_replays_or_goes_back_is_in_the_same_state(schema: Any) -> None:
    grammar = checked(schema)
    budget = grammar.shortest + 16
    tokens = answer(grammar.matcher(budget), VOCABULARY, WORST["long"], budget, 1)
    going, replayed = grammar.matcher(budget), grammar.matcher(budget)
    for token in tokens:
        before = going.snapshot()
        assert going.accept(token)
        going.restore(before)
        assert allowed_tokens(going, VOCABULARY) == allowed_tokens(replayed, VOCABULARY)
        fork = going.fork()
        assert fork.accept(token)
        assert going.accept(token)
        assert replayed.accept(token)
        assert allowed_tokens(going, VOCABULARY) == allowed_tokens(fork, VOCABULARY)


def test_a_schema_without_an_answer_is_refused_as_before() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
        "not": {"properties": {"a": {"type": "integer"}}},
    }
    with pytest.raises(GrammarError, match=r"'not' at #/not|No (finite )?answer") as refusal:
        COMPILER.compile(GrammarSpec("json_schema", json.dumps(schema)))
    assert refusal.value.param == "response_format.json_schema.schema"


BODY = {
    "type": "object",
    "properties": {"a": SCHEMAS["a set of tuples"], "b": {"type": "integer"}, "c": {}},
    "anyOf": [{"required": ["a", "b"]}, {"required": ["a", "c"]}],
}


def test_in_any_order_a_checked_object_prefers_a_form_without_the_order_of_the_schema() -> None:
    spec = GrammarSpec("json_schema", json.dumps(BODY), checked=True, any_order=True)
    grammar = COMPILER.compile_here(spec)
    for text, valid in (
        ('{"a":[1],"b":1}', True),
        ('{"b":1,"a":[1,"x"]}', True),
        ('{"c":null,"b":1,"a":[]}', True),
        ('{"b":1,"a":[1,1]}', False),
        ('{"b":1}', False),
    ):
        assert accepts(grammar.matcher(), VOCABULARY, text.encode()) is valid, text


def looser_schemas(asked: dict[str, Any], *schemas: Any) -> list[Any]:
    """The looser schemas that were wanted before `asked` was refused."""
    wanted: list[Any] = []

    def looser(_: Any) -> Iterator[Any]:
        for schema in schemas:
            wanted.append(schema)
            yield schema

    table = TokenTable(VOCABULARY)
    loosening = Loosening(looser, make_backend("llguidance", table.bytewise()), table)
    with pytest.raises(GrammarError, match="No answer"):
        loosening.answers(Json(asked, True, "schema"), lambda _: True)
    return wanted


def test_no_looser_schemas_are_made_if_no_answer_is_found() -> None:
    impossible = {"type": "array", "items": {"type": "integer", "not": {"type": "number"}}, "minItems": 1}
    assert looser_schemas(impossible, {"type": "array"}, True) == []


def test_all_looser_schemas_are_tried_if_none_allows_an_answer() -> None:
    nul = {"const": "\0"}  # no grammar can write it
    assert len(looser_schemas(nul, {"type": "string"}, {"type": "string"}, True)) == 3


@pytest.fixture(scope="module")
def sandboxed() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(VOCABULARY, limits=PATIENT)
    yield compiler
    compiler.close()


def test_the_checks_are_made_in_a_process_of_their_own(sandboxed: GrammarCompiler) -> None:
    schema = SCHEMAS["a set of tuples"]
    grammar = sandboxed.compile(GrammarSpec("json_schema", json.dumps(schema)))
    assert isinstance(grammar, RemoteGrammar)
    assert grammar.shortest == 1  # the token `[]`
    rng = random.Random(3)
    written = b""
    remote = grammar.begin(24, ())
    for _ in range(24):
        eventually(lambda: remote.ready, "the mask has come")
        row = np.zeros((1, words_of(VOCABULARY.size)), np.int32)
        remote.fill(row, 0)
        if allows(row[0], 256):
            break
        assert remote.verifies
        token = None
        while token is None:
            bits = np.unpackbits(row.view(np.uint8), bitorder="little")
            token = int(rng.choice(np.flatnonzero(bits)))
            found = None
            while (found := remote.veto(token, 1.0)) is UNDECIDED:
                pass
            if found is not None:
                row[0] &= ~found.view(np.int32)
                token = None
        remote.accept(token)
        written += VOCABULARY.tokens[token]
    assert remote.failure is None
    assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(written)), written


def test_a_schema_whose_grammar_would_be_too_complex_is_checked(sandboxed: GrammarCompiler) -> None:
    spec = GrammarSpec("json_schema", json.dumps(HOSTILE["conditions that multiply"]))
    assert isinstance(sandboxed.compile(spec), RemoteGrammar)


@pytest.mark.parametrize("prefer", WORST.values(), ids=WORST)
def test_a_schema_is_bound_of_which_the_planner_finds_no_answer(
    monkeypatch: pytest.MonkeyPatch, prefer: Any
) -> None:
    monkeypatch.setattr(Planner, "plan", lambda *_, **__: None)
    monkeypatch.setattr(Planner, "search", lambda *_, **__: None)
    schema = SCHEMAS["a condition on a number"]
    tokens = answer(checked(schema).matcher(24), VOCABULARY, prefer, 24, 0)
    assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text_of(tokens, VOCABULARY)))
