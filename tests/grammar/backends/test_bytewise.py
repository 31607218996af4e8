"""A vocabulary of bytes is served by a shorter way through llguidance: it allows the same."""

import json
import random

import pytest
from grammar_walks import allowed_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from json_schemas import schemas as any_schema

from personae.errors import GrammarError
from personae.grammar.backends.llguidance import LLGuidanceBackend
from personae.grammar.spec import GrammarSpec
from personae.grammar.vocabulary import Vocabulary

BYTES = tuple(bytes((byte,)) for byte in range(256))
BYTEWISE = Vocabulary((*BYTES, b"", b""), (256,), {"<tool>": 257})
LONGER = Vocabulary((*BYTEWISE.tokens, b"the"), (256,), {"<tool>": 257})


def walk_both(spec: GrammarSpec, seed: int) -> None:
    bytewise = LLGuidanceBackend(BYTEWISE).compile(spec).matcher()
    other = LLGuidanceBackend(LONGER).compile(spec).matcher()
    rng, written = random.Random(seed), 0
    for _ in range(80):
        assert bytewise.forced() == other.forced()
        allowed = allowed_tokens(bytewise, BYTEWISE)
        assert allowed == [token for token in allowed_tokens(other, LONGER) if token < BYTEWISE.size]
        token = rng.choice(allowed)
        if rng.random() < 0.2:
            for one in (bytewise, other):
                forced = one.forced()
                assert one.follows([*forced]) == len(forced)
                back = min(written, 3)
                one.restore(one.snapshot() - back)
            written -= back
            continue
        assert bytewise.accept(token)
        assert other.accept(token)
        written += 1
        if bytewise.terminated:
            assert other.terminated
            break


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("json_object", ""),
        GrammarSpec("json_schema", "true"),
        GrammarSpec("json_schema", '{"enum": ["größe", "日本語", {"a": [1, null]}, 12.5]}'),
        GrammarSpec("json_schema", '{"type": "string", "pattern": "^é+x$", "maxLength": 9}'),
        GrammarSpec("json_schema", '{"not a keyword": 1, "type": ["null", "integer"]}', strict=False),
    ],
    ids=lambda spec: spec.source[:12],
)
def test_it_allows_and_forces_what_a_larger_vocabulary_does(spec: GrammarSpec) -> None:
    for seed in range(6):
        walk_both(spec, seed)


@settings(max_examples=40)
@given(any_schema(), st.integers(0, 99))
def test_so_does_any_schema(schema: dict[str, object], seed: int) -> None:
    try:
        walk_both(GrammarSpec("json_schema", json.dumps(schema)), seed)
    except GrammarError:
        with pytest.raises(GrammarError):
            LLGuidanceBackend(LONGER).compile(GrammarSpec("json_schema", json.dumps(schema)))
