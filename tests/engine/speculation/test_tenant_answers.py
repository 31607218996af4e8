"""Guesses from earlier answers: only a tenant's own, with the same adapter, within bounds, and no token
differs."""

import random
from pathlib import Path
from typing import Any

import pytest
from bundled import harness
from engine_harness import EngineHarness, log_of
from hypothesis import given
from hypothesis import strategies as st
from tiny_adapters import make_zoo
from tiny_models import model_folder
from wishes import agree, logs, truth

from personae.engine.speculation.policy import Always, Measured
from personae.engine.speculation.tenant_answers import SIZES, AnswerIndex, TenantAnswers, key_of

PROMPT = random.Random(7).choices(range(4, 500), k=30)


@given(
    answers=st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=4),
    tail=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    most=st.integers(1, 7),
)
def test_what_followed_the_longest_match_last_is_guessed(
    answers: list[list[int]], tail: list[int], most: int
) -> None:
    index = AnswerIndex()
    for answer in answers:
        index.add((), answer)
    draft = index.find(tail, most)
    expected = None
    for size in SIZES:
        found = [
            answer[end : end + most]
            for answer in answers
            for end in range(size, len(answer))
            if len(tail) >= size and answer[end - size : end] == tail[-size:]
        ]
        if found:
            expected = tuple(found[-1])
            break
    assert (None if draft is None else draft.tokens) == expected


def test_the_first_tokens_of_an_answer_are_guessed_from_the_end_of_its_prompt() -> None:
    answers = TenantAnswers()
    log = log_of("a", [*range(20, 30)])
    answers.add(log, [*log.tokens, 1, 2, 3])
    draft = answers.find(key_of(log), [50, *range(22, 30)], 5)
    assert draft is not None
    assert (draft.tokens, draft.match) == ((1, 2, 3), 8)


def test_a_sequence_that_was_preempted_adds_each_token_once() -> None:
    answers = TenantAnswers()
    answers.add(log_of("a", [9] * 10), [*[9] * 10, 1, 2, 3])
    before = len(answers)
    resumed = log_of("a", [*[9] * 10, 1, 2, 3])
    answers.add(resumed, [*resumed.tokens])
    assert len(answers) == before
    answers.add(resumed, [*resumed.tokens, 4, 5])
    assert len(answers) == before + SIZES[0] + 2 + 1


def test_no_more_tokens_are_kept_than_the_bounds_allow() -> None:
    answers = TenantAnswers(most=1000, each=300)
    rng = random.Random(1)
    log, newest = log_of("", [7]), [7]
    for number in range(200):
        log = log_of(f"{number}", [7] * 10, tenant=f"{number % 9}")
        newest = [*log.tokens, *rng.choices(range(500), k=rng.randint(0, 90))]
        answers.add(log, newest)
        assert len(answers) <= 1000
        assert all(len(answers._indexes[key]) <= 300 for key in answers._indexes)
    assert answers.find(key_of(log), newest[10:20], 3) is not None
    assert answers.find(key_of(log_of("a", [7], tenant="2")), newest[10:20], 3) is None


def test_one_long_answer_takes_no_more_than_its_share() -> None:
    answers = TenantAnswers(most=50_000, each=400)
    answers.add(log_of("a", [7] * 10), [*[7] * 10, *range(20_000)])
    assert len(answers) <= 400 / 4 + SIZES[0] + 1
    assert answers.find(key_of(log_of("b", [7])), range(19_980, 19_990), 2) is not None


def drafted(made: EngineHarness) -> int:
    return made.scheduler.counters.drafts_by.get("tenant", 0)


@pytest.fixture(scope="module")
def base() -> Path:
    return model_folder("qwen3", num_hidden_layers=2)


def test_nothing_is_guessed_from_answers_of_another_tenant_salt_or_adapter(
    base: Path, tmp_path: Path
) -> None:
    adapters = make_zoo(tmp_path, base, ("rank-1", "rank-64"))
    made = EngineHarness(base, adapters, policy=Always(), answers=TenantAnswers())
    asked = {"max_tokens": 40, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    one = {"tenant": "one", "salt": b"1"}
    first = made.play([made.log("a", PROMPT, "rank-1", **asked, **one)])["a"].tokens
    assert drafted(made) == 0
    others: list[tuple[str | None, dict[str, Any]]] = [
        ("rank-1", {"tenant": "two", "salt": b"2"}),
        ("rank-1", {"tenant": "one", "salt": b"1 and a cache_salt"}),
        ("rank-64", one),
        (None, one),
    ]
    for number, (adapter, whose) in enumerate(others):
        made.play([made.log(f"{number}", PROMPT, adapter, **asked, **whose)])
        assert drafted(made) == 0, (adapter, whose)
    again = made.play([made.log("b", PROMPT, "rank-1", **asked, **one)])["b"].tokens
    assert again == first
    assert drafted(made) > 0
    assert made.scheduler.counters.accepted_by["tenant"] > 20


def test_a_request_without_speculation_neither_guesses_nor_is_guessed_from(base: Path) -> None:
    made = EngineHarness(base, policy=Always(), answers=TenantAnswers())
    asked = {"max_tokens": 40, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    made.play([made.log("a", PROMPT, speculate=False, **asked)])
    made.play([made.log("b", PROMPT, **asked)])
    assert drafted(made) == 0
    before = made.scheduler.counters.draft_tokens
    made.play([made.log("c", PROMPT, speculate=False, **asked)])
    assert made.scheduler.counters.draft_tokens == before


def test_answers_have_the_same_tokens_with_guesses_from_earlier_answers() -> None:
    for policy in (Always(), Measured()):
        made = harness(policy=policy, answers=TenantAnswers())
        for _ in range(3):
            agree(made.play(logs(made)), truth())
        if isinstance(policy, Always):
            assert made.scheduler.counters.accepted_by["tenant"] > 50
