"""When a step's masks are made, and tokens are taken: during the forward pass, or after the step before."""

from dataclasses import dataclass, field

import pytest
from tiny_models import model_folder
from troupe import Troupe

from personae.grammar.bitmask import Bitmask, allow_only
from personae.grammar.spec import GrammarSpec

SPEC = GrammarSpec("regex", "what is allowed is in the test")
PROMPT = [5, 6, 7]


@dataclass
class Counting:
    """A grammar of one answer: 10, 11, 12, ... It does not take `refused`."""

    refused: int | None = None
    taken: list[int] = field(default_factory=list)
    taken_during: list[bool] = field(default_factory=list)
    during: list[bool] = field(default_factory=list)
    computing: bool = False
    nbytes = 0
    shortest = 1
    terminated = False

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
def troupe() -> Troupe:
    return Troupe(model_folder("llama"))


def watched(troupe: Troupe, grammar: Counting) -> None:
    """Tells the grammar when a forward pass runs."""
    forward = troupe.engine.runner.forward

    def watching(*arguments):
        grammar.computing = True
        try:
            return forward(*arguments)
        finally:
            grammar.computing = False

    troupe.engine.runner.forward = watching


@pytest.mark.parametrize("lookahead", [1, 2])
def test_tokens_are_taken_and_masks_filled_during_the_forward_pass(troupe, lookahead) -> None:
    troupe.lookahead = lookahead
    grammar = Counting()
    troupe.grammars[SPEC] = grammar
    watched(troupe, grammar)
    brought = troupe.play([troupe.log("a", PROMPT, grammar=SPEC, max_tokens=6)])["a"]
    assert brought.tokens == [10, 11, 12, 13, 14, 15]
    assert grammar.taken == brought.tokens
    assert all(grammar.during)
    if lookahead == 2:
        assert grammar.taken_during == [True] * 5 + [False], "after the last there is no step"


def test_on_a_device_that_runs_by_itself_they_wait_for_the_step_before(troupe) -> None:
    troupe.engine.runs_ahead = True
    grammar = Counting()
    troupe.grammars[SPEC] = grammar
    watched(troupe, grammar)
    assert troupe.play([troupe.log("a", PROMPT, grammar=SPEC, max_tokens=4)])["a"].tokens == [10, 11, 12, 13]
    assert grammar.during
    assert not any(grammar.during)


def test_a_token_that_the_grammar_does_not_take_ends_its_row_and_no_other(troupe) -> None:
    grammar = Counting(refused=12)
    troupe.grammars[SPEC] = grammar
    free = troupe.log("free", PROMPT, max_tokens=8)
    alone = troupe.play([free])["free"].tokens
    played = troupe.play([troupe.log("a", PROMPT, grammar=SPEC, max_tokens=8), free])
    assert played["a"].finish == "error"
    assert "does not allow the sampled token 12" in str(played["a"].error)
    assert played["free"].tokens == alone


def test_a_slot_that_changes_hands_brings_no_token_of_the_one_before(troupe) -> None:
    first, second = Counting(), Counting()
    other = GrammarSpec("regex", "another")
    troupe.grammars |= {SPEC: first, other: second}
    assert troupe.play([troupe.log("a", PROMPT, grammar=SPEC, max_tokens=3)])["a"].tokens == [10, 11, 12]
    assert troupe.play([troupe.log("b", PROMPT, grammar=other, max_tokens=3)])["b"].tokens == [10, 11, 12]
    assert second.taken == [10, 11, 12]
    assert first.taken == [10, 11, 12]
