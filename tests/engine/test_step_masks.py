"""When a step's masks are made, and tokens are taken: during the forward pass, or after the step before."""

from dataclasses import dataclass, field

import pytest
from engine_harness import EngineHarness
from tiny_models import model_folder

from personae.grammar.backend import BoundGrammar
from personae.grammar.bitmask import Bitmask, allow_only
from personae.grammar.matcher import Matcher
from personae.grammar.spec import GrammarSpec

SPEC = GrammarSpec("regex", "what is allowed is in the test")
PROMPT = [5, 6, 7]


@dataclass
class Counting(Matcher, BoundGrammar):
    """A grammar and its only answer: 10, 11, 12, ... It does not take `refused`."""

    refused: int | None = None
    taken: list[int] = field(default_factory=list)
    taken_during: list[bool] = field(default_factory=list)
    during: list[bool] = field(default_factory=list)
    computing: bool = False
    nbytes = 0
    shortest = 1
    failed = False
    feed = follows = snapshot = restore = forced = fork = unbudgeted = None  # type: ignore[assignment]  # never called

    def matcher(self, budget: int | None = None) -> "Counting":
        return self

    def fill(self, bitmask: Bitmask, row: int) -> None:
        self.during.append(self.computing)
        allow_only(bitmask[row], [10 + len(self.taken)])

    def accept(self, token: int) -> bool:
        if token == self.refused:
            return False
        self.taken.append(token)
        self.taken_during.append(self.computing)
        return True


@pytest.fixture
def harness() -> EngineHarness:
    return EngineHarness(model_folder("llama"))


def watched(harness: EngineHarness, grammar: Counting) -> None:
    """Tells the grammar when a forward pass runs."""
    forward = harness.engine.worker.forward

    def watching(*arguments):
        grammar.computing = True
        try:
            return forward(*arguments)
        finally:
            grammar.computing = False

    harness.engine.worker.forward = watching


@pytest.mark.parametrize("lookahead", [1, 2])
def test_tokens_are_taken_and_masks_filled_during_the_forward_pass(harness, lookahead) -> None:
    harness.lookahead = lookahead
    grammar = Counting()
    harness.grammars[SPEC] = grammar
    watched(harness, grammar)
    brought = harness.play([harness.log("a", PROMPT, grammar=SPEC, max_tokens=6)])["a"]
    assert brought.tokens == [10, 11, 12, 13, 14, 15]
    assert grammar.taken == brought.tokens
    assert all(grammar.during)
    if lookahead == 2:
        assert grammar.taken_during == [True] * 5 + [False], "after the last there is no step"


def test_on_a_device_that_runs_by_itself_they_wait_for_the_step_before(harness) -> None:
    harness.engine.runs_ahead = True
    grammar = Counting()
    harness.grammars[SPEC] = grammar
    watched(harness, grammar)
    assert harness.play([harness.log("a", PROMPT, grammar=SPEC, max_tokens=4)])["a"].tokens == [
        10,
        11,
        12,
        13,
    ]
    assert grammar.during
    assert not any(grammar.during)


def test_a_token_that_the_grammar_does_not_take_ends_its_row_and_no_other(harness) -> None:
    grammar = Counting(refused=12)
    harness.grammars[SPEC] = grammar
    free = harness.log("free", PROMPT, max_tokens=8)
    alone = harness.play([free])["free"].tokens
    played = harness.play([harness.log("a", PROMPT, grammar=SPEC, max_tokens=8), free])
    assert played["a"].finish == "error"
    assert "rejects the sampled token 12" in str(played["a"].error)
    assert played["free"].tokens == alone


def test_a_slot_that_changes_hands_brings_no_token_of_the_one_before(harness) -> None:
    first, second = Counting(), Counting()
    other = GrammarSpec("regex", "another")
    harness.grammars |= {SPEC: first, other: second}
    assert harness.play([harness.log("a", PROMPT, grammar=SPEC, max_tokens=3)])["a"].tokens == [10, 11, 12]
    assert harness.play([harness.log("b", PROMPT, grammar=other, max_tokens=3)])["b"].tokens == [10, 11, 12]
    assert second.taken == [10, 11, 12]
    assert first.taken == [10, 11, 12]
