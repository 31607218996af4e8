"""A matcher that goes back to a snapshot is in the state of one that got no further tokens."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
from grammar_walks import allowed_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE, eventually
from worst import text_vocabulary, veto

from personae.grammar.bitmask import words_of
from personae.grammar.budget.matcher import BudgetMatcher
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.matcher import MOST_RESTORED, Matcher
from personae.grammar.registry import make_backend
from personae.grammar.sandbox.forkserver import Sandbox
from personae.grammar.sandbox.masks import RemoteGrammar, RemoteMatcher
from personae.grammar.sandbox.server import SandboxLimits
from personae.grammar.spec import GrammarSpec, ReasoningLimit
from personae.grammar.structure.elements import Concat, Json, Until, structure_spec

VOCABULARY = text_vocabulary(("<tool>",))
STRING = {"type": "string"}
CLOSED = {"type": "object", "additionalProperties": False}
OBJECT = CLOSED | {
    "properties": {"a": STRING, "b": {"type": "array", "items": {"type": "integer"}}, "c": STRING},
    "required": ["a", "b"],
}
SHORT = {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 2}
THINKS = Concat((Until("</t>"), Json(OBJECT, strict=True, param="x")))

SPECS: dict[str, GrammarSpec] = {
    "object": GrammarSpec("json_schema", json.dumps(OBJECT)),
    "short strings": GrammarSpec("json_schema", json.dumps(SHORT)),
    "regex": GrammarSpec("regex", "([a-z]{1,9} ?)+[0-9]{3}"),
    "automaton": GrammarSpec("regex", "[0-9]{4}-(0[1-9]|1[0-2])(-[a-z]{1,3})?"),
    "lark": GrammarSpec("lark", 'start: "(" start ")" | /[a-z]+/'),
    "ebnf": GrammarSpec("ebnf", 'root ::= "[" [a-z]* "]" | "[" root "]"'),
    "structure": structure_spec(THINKS),
    "limited": msgspec.structs.replace(
        structure_spec(THINKS), reasoning=ReasoningLimit(9, "<t>", "</t>", opened=True)
    ),
}
BACKENDS = {
    "llguidance": SPECS["object"],
    "xgrammar": SPECS["object"],
    "outlines": SPECS["automaton"],
}
State = tuple[list[int], bool, list[list[int] | None]]


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(VOCABULARY, sandboxed=False)


@cache
def grammar(name: str) -> Any:
    return compiler().compile_here(SPECS[name])


@cache
def backend_grammar(name: str) -> Any:
    return make_backend(name, VOCABULARY).compile(BACKENDS[name])


def state(matcher: Matcher, rng: random.Random) -> State:
    """What it allows, whether it has ended, and what it says to some tokens."""
    allowed = allowed_tokens(matcher, VOCABULARY)
    some = rng.sample(allowed, min(2, len(allowed)))
    vetoes = [veto(matcher.fork(), token) for token in some]
    return allowed, matcher.terminated, [None if one is None else one.tolist() for one in vetoes]


def chosen(matcher: Matcher, rng: random.Random) -> int | None:
    """A token without a veto, as a step finds one; seldom what ends the answer."""
    allowed = allowed_tokens(matcher, VOCABULARY)
    stops = VOCABULARY.stop_ids
    allowed.sort(key=lambda token: (rng.random() < 0.9 and token in stops, rng.random()))
    return next((token for token in allowed if veto(matcher, token) is None), None)


def wander(new: Callable[[], Matcher], seed: int, steps: int = 60) -> None:
    """Snapshots, drafts and ways back, at random; after each the state is that of a fresh matcher."""
    rng = random.Random(seed)
    matcher, said = new(), list[int]()
    kept: list[tuple[Any, int]] = []
    for _ in range(steps):
        kept.append((matcher.snapshot(), len(said)))
        for _ in range(rng.randint(1, 6)):
            token = None if matcher.terminated else chosen(matcher, rng)
            if token is None:
                break
            assert matcher.accept(token)
            said.append(token)
        if rng.random() < 0.7 or matcher.terminated:
            del kept[len(kept) - rng.randint(0, min(3, len(kept) - 1)) :]
            snapshot, length = kept[-1]
            matcher.restore(snapshot)
            del said[length:]
        fresh = new()
        assert fresh.feed(said) == len(said)
        told = rng.random()
        assert state(matcher, random.Random(told)) == state(fresh, random.Random(told))


@settings(max_examples=12)
@given(name=st.sampled_from(sorted(BACKENDS)), seed=st.integers(0, 10**6))
def test_a_backends_matcher_is_as_if_what_was_taken_back_had_not_been_said(name: str, seed: int) -> None:
    wander(backend_grammar(name).matcher, seed, 30)


@settings(max_examples=24)
@given(
    name=st.sampled_from(sorted(SPECS)),
    spare=st.sampled_from((0, 5, 40, 400, None)),
    seed=st.integers(0, 10**6),
)
def test_so_is_one_that_keeps_a_budget_or_a_limit(name: str, spare: int | None, seed: int) -> None:
    made = grammar(name)
    budget = None if spare is None else made.shortest + spare
    wander(lambda: made.matcher(budget), seed, 15)


def test_going_back_costs_what_is_taken_back_however_long_the_answer_is() -> None:
    matcher = grammar("object").matcher(6000)
    assert isinstance(matcher, BudgetMatcher)
    begun = [*b'{"a":"', *b"the quick brown fox " * 200]
    assert matcher.feed(begun) == len(begun)
    told: list[int] = []
    inner: Any = matcher._inner
    inner.feed, inner.accept = _counted(inner.feed, told), _counted(inner.accept, told)
    for _ in range(100):
        allowed_tokens(matcher, VOCABULARY)
        here = matcher.snapshot()
        assert matcher.feed(b'the"') == 4
        matcher.restore(here)
        assert matcher.accept(ord("x"))
    assert sum(told) <= 100 * (5 + 64)


def _counted(tell: Callable[[Any], Any], told: list[int]) -> Callable[[Any], Any]:
    def counting(tokens: Any) -> Any:
        told.append(len(tokens) if isinstance(tokens, Sequence) else 1)
        return tell(tokens)

    return counting


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox(VOCABULARY, SandboxLimits(patience=PATIENCE, mask=1.0, mask_wall=PATIENCE))
    yield sandbox
    sandbox.close()


def remote_mask(matcher: RemoteMatcher) -> list[int]:
    eventually(lambda: matcher.ready, "the mask has come")
    assert matcher.failure is None
    row = np.zeros((1, words_of(VOCABULARY.size)), np.int32)
    matcher.fill(row, 0)
    return [int(token) for token in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))]


@pytest.mark.parametrize("wait", [True, False])
def test_an_answer_whose_masks_are_made_elsewhere_goes_back_as_well(sandbox: Sandbox, wait: bool) -> None:
    made = compiler().compile_here(SPECS["ebnf"])
    remote = compiler()._remote(sandbox, SPECS["ebnf"], "")
    assert isinstance(remote, RemoteGrammar)
    there, said, kept = remote.begin(40, ()), list[int](), list[tuple[Any, int]]()
    rng = random.Random(5)
    for _ in range(30):
        kept.append((there.snapshot(), len(said)))
        for _ in range(rng.randint(1, 3)):
            token = rng.choice(remote_mask(there) if wait or not said else [ord("!"), ord("x")])
            if token in VOCABULARY.stop_ids or there._left < 4:
                break
            there.accept(token)
            said.append(token)
        if rng.random() < 0.6 or not wait or there._left < 4:
            back = len(kept) if there._left < 4 else rng.randint(1, min(3, len(kept)))
            del kept[len(kept) - back + 1 :]
            snapshot, length = kept[-1]
            there.restore(snapshot)
            del said[length:]
        local = made.matcher(40)
        assert local.feed(said) == len(said)
        if wait or rng.random() < 0.5:
            assert remote_mask(there) == allowed_tokens(local, VOCABULARY)


def test_of_an_answer_whose_masks_are_made_elsewhere_the_last_snapshots_are_kept(sandbox: Sandbox) -> None:
    remote = compiler()._remote(sandbox, SPECS["ebnf"], "")
    there = remote.begin(400, ())
    snapshots = []
    for _ in range(2 * MOST_RESTORED):
        snapshots.append(there.snapshot())
        there.accept(ord("["))
        remote_mask(there)
    there.restore(snapshots[-MOST_RESTORED])
    assert len(remote_mask(there)) > 1
