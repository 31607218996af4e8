"""Answers have the tokens that they have without drafts, whatever is guessed and whatever binds them."""

import json
import random
from functools import cache
from typing import Any

import jsonschema
import pytest
from bundled import OBJECT, PROMPT, SCHEMA, harness, tokenizer
from engine_harness import EngineHarness, Played
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import oracles
from wishes import VOCAB, WISHES, agree, logs, truth

from personae.engine.plan import StepPlan
from personae.engine.speculation.policy import Always, Measured


@pytest.mark.parametrize("right", [1.0, 0.8, 0.4, 0.0])
def test_every_wish_gets_the_tokens_that_it_gets_without_drafts(right: float) -> None:
    made = harness(policy=Always(), propose=oracles(truth(), right, VOCAB))
    agree(made.play(logs(made)), truth())
    made.scheduler.check_integrity()
    counters = made.scheduler.counters
    drafts, accepted = counters.draft_tokens, counters.accepted_tokens
    assert drafts > 100
    assert accepted > 100 if right == 1.0 else accepted < drafts
    assert sum(counters.accepted_at) == accepted


def test_right_drafts_save_steps() -> None:
    plain, guessed = harness(), harness(policy=Always(), propose=oracles(truth(), 1.0, VOCAB))
    for made in (plain, guessed):
        agree(made.play(logs(made)[:2]), {id: truth()[id] for id in "01"})
    assert guessed.steps < plain.steps / 2


@pytest.mark.parametrize(
    "sizes",
    [
        {"lookahead": 1},
        {"lookahead": 3},
        {"runs_ahead": True},
        {"max_seqs": 4, "max_batch_tokens": 9},
        {"page_size": 4, "num_pages": 60, "max_model_len": 200},
        {"page_size": 4, "num_pages": 60, "max_model_len": 200, "runs_ahead": True, "lookahead": 3},
    ],
    ids=str,
)
def test_drafts_change_nothing_in_any_batch_and_after_preemptions(sizes: dict[str, Any]) -> None:
    made = harness(policy=Always(), propose=oracles(truth(), 0.7, VOCAB), **sizes)
    agree(made.play(logs(made)), truth())
    if "num_pages" in sizes:
        assert made.scheduler.counters.preemptions


def test_guesses_from_the_text_itself_change_nothing_either() -> None:
    for policy in (Always(), Measured()):
        made = harness(policy=policy)
        agree(made.play(logs(made)), truth())
        agree(made.play(logs(made)), truth())  # from the prefix cache


class Rests(Always):
    """Rests after steps at random."""

    def __init__(self) -> None:
        self._dice = random.Random(3)

    def rest(self, rows: int, *, tried: bool) -> int:
        return self._dice.choice((0, 0, 1, 2, 5, 9))


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"lookahead": 3},
        {"runs_ahead": True},
        {"max_seqs": 4, "max_batch_tokens": 9},
        {"page_size": 4, "num_pages": 60, "max_model_len": 200},
    ],
    ids=str,
)
def test_drafts_that_rest_in_between_change_nothing(sizes: dict[str, Any]) -> None:
    made = harness(policy=Rests(), propose=oracles(truth(), 0.8, VOCAB), **sizes)
    agree(made.play(logs(made)), truth())
    assert made.scheduler.counters.accepted_tokens > 50
    if "num_pages" in sizes:
        assert made.scheduler.counters.preemptions


def test_a_step_is_read_while_the_next_one_runs_if_drafts_rest() -> None:
    made = harness(policy=Rests(), propose=oracles(truth(), 0.8, VOCAB))
    speculator = made.engine._speculator
    assert speculator is not None
    asked: list[bool] = []
    needs = speculator.needs_results

    def noted(plan: StepPlan) -> bool:
        asked.append(needs(plan))
        return asked[-1]

    speculator.needs_results = noted  # type: ignore[method-assign]  # looks on
    agree(made.play(logs(made)), truth())
    assert sum(not each for each in asked) > len(asked) / 4
    assert any(asked)


def test_bound_answers_are_whole_with_wrong_drafts_and_any_budget() -> None:
    made = harness(policy=Always())
    shortest = made.grammars[OBJECT].shortest
    for budget in range(shortest, shortest + 12):
        log = made.log("a", PROMPT, grammar=OBJECT, max_tokens=budget, temperature=1.0, seed=budget)
        plain = harness_alone().play([log])["a"]
        played = made.play([log])["a"]
        assert played.tokens == plain.tokens
        jsonschema.validate(json.loads(tokenizer().decode(played.tokens)), SCHEMA)


def test_drafts_behind_several_forced_tokens_change_nothing() -> None:
    def play(made: EngineHarness) -> Played:
        settings = {"max_tokens": 200, "jump_forward": True, "eos": tokenizer().eos_ids}
        return made.play([made.log("a", PROMPT, grammar=OBJECT, **settings)])["a"]

    alone = play(harness())
    for right in (1.0, 0.6):
        made = harness(policy=Always(), propose=oracles({"a": alone}, right, VOCAB))
        assert play(made).tokens == alone.tokens
        assert made.scheduler.counters.jumped > 3
        assert made.scheduler.counters.accepted_tokens > 3


@cache
def harness_alone() -> EngineHarness:
    return harness()


@cache
def long_lived() -> dict[float, EngineHarness]:
    return {right: harness(policy=Always(), propose=oracles(truth(), right, VOCAB)) for right in (0.9, 0.5)}


@settings(deadline=None, max_examples=12)
@given(
    right=st.sampled_from([0.9, 0.5]),
    cut=st.integers(1, 29),
    chosen=st.sets(st.integers(0, len(WISHES) - 1), min_size=1, max_size=5),
)
def test_a_log_taken_up_anywhere_goes_on_as_without_drafts(right: float, cut: int, chosen: set[int]) -> None:
    """As after a crash between two deltas, wherever the drafts stood."""
    made = long_lived()[right]
    resumed = []
    for number in chosen:
        log, said = logs(made)[number], truth()[f"{number}"].tokens[:cut]
        if len(said) < len(truth()[f"{number}"].tokens) and not log.params.jump_forward:
            fields = {name: getattr(log, name) for name in log.__struct_fields__}
            resumed.append(type(log)(**{**fields, "tokens": (*log.tokens, *said)}))
    played = made.play(resumed)
    for log in resumed:
        said = len(log.tokens) - log.prompt_length
        assert played[log.id].tokens == truth()[log.id].tokens[said:]
