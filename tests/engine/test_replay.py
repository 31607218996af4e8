"""Answers of several thousand tokens that are replayed: token by token, without masks between."""

import json
import random
from functools import cache
from typing import Any

import pytest
from grammar_walks import allowed_tokens
from worst import text_vocabulary

from personae.grammar.backend import BoundGrammar
from personae.grammar.checked.grammar import CheckedGrammar
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.replay import ReplayBinding
from personae.grammar.spec import GrammarSpec

VOCABULARY = text_vocabulary()
PROMPT = (1, 2, 3)
ROW: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}$"},
        "mail": {"type": "string", "format": "email"},
        "at": {"type": "string", "format": "date-time"},
        "n": {"type": "number", "minimum": -5.5, "maximum": 1_000_000},
        "s": {"type": "string", "maxLength": 400},
        "ab": {"type": "string", "pattern": "^(a|b)*a(a|b){10}$"},
    },
    "required": ["id", "mail", "at", "n", "s", "ab"],
    "additionalProperties": False,
}
ROWS = {"type": "array", "items": ROW}
SETS = {
    "type": "object",
    "properties": {
        "numbers": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        "words": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    },
    "required": ["numbers", "words"],
    "additionalProperties": {"type": "integer"},
}
CHECKED = {
    "type": "object",
    "properties": {"rows": ROWS, "count": {"type": "integer"}},
    "required": ["rows", "count"],
    "additionalProperties": False,
    "not": {"properties": {"count": {"multipleOf": 7}}},
}
_RNG = random.Random(5)


def row(place: int) -> dict[str, Any]:
    return {
        "id": f"{place * 2654435761 % 2**32:08x}-{place:04x}-4{place:03x}",
        "mail": f"a{place}.b-{place}@mail{place}.example.org",
        "at": f"2024-0{place % 9 + 1}-1{place % 10}T10:0{place % 10}:00Z",
        "n": round(_RNG.uniform(-5, 900_000), 4),
        "s": "".join(_RNG.choice('abc déf\n"x日') for _ in range(40)),
        "ab": "".join(_RNG.choice("ab") for _ in range(40)) + "a" + "b" * 10,
    }


LISTED = [row(place) for place in range(20)]
TURNED = [dict(reversed(one.items())) for one in LISTED]
SET = {
    "words": [f"w{place * 7919 % 100_003}" for place in range(200)],
    "z": 1,
    "numbers": _RNG.sample(range(10**6), 200),
}
ANSWERS: dict[str, tuple[GrammarSpec, Any]] = {
    "plain": (GrammarSpec("json_schema", json.dumps(ROWS)), LISTED),
    "in any order": (GrammarSpec("json_schema", json.dumps(ROWS), any_order=True), TURNED),
    "sets": (GrammarSpec("json_schema", json.dumps(SETS), any_order=True), SET),
    "checked": (
        GrammarSpec("json_schema", json.dumps(CHECKED), checked=True),
        {"rows": LISTED, "count": 3},
    ),
}


@cache
def compiled(spec: GrammarSpec) -> BoundGrammar:
    return GrammarCompiler(VOCABULARY, sandboxed=False).compile_here(spec)


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_long_answer_is_replayed_to_where_it_was(kind: str) -> None:
    spec, value = ANSWERS[kind]
    grammar = compiled(spec)
    assert isinstance(grammar, CheckedGrammar) == (kind == "checked")
    tokens = (*json.dumps(value, ensure_ascii=False).encode(),)
    assert len(tokens) > 3000
    budget = len(tokens) + 300
    for left in (len(tokens) // 2, 0):
        written = tokens[: len(tokens) - left]
        replay = ReplayBinding(grammar.matcher(budget), written)
        pieces = 1
        while (matcher := replay.replayed(0.0)) is None:
            pieces += 1
        assert pieces == len(written)
        assert not matcher.failed
        allowed = allowed_tokens(matcher, VOCABULARY)
        assert tokens[len(written)] in allowed if left else 256 in allowed
        assert len(allowed) < VOCABULARY.size, "it is bound"
        rest = (*tokens[len(written) :], 256)
        assert matcher.feed(rest) == len(rest)
    with pytest.raises(AssertionError, match="do not match its grammar"):
        ReplayBinding(grammar.matcher(budget), (*written, 120)).replayed(60.0)
