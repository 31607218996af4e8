"""How many drafts are tried: as many as pay, by what steps took and how many were right."""

import pytest

from personae.engine.speculation.policy import Candidate, Measured, Record
from personae.engine.speculation.proposer import Draft

STEPS = 8  # of each size
DRAFT = Draft((1, 2, 3, 4, 5, 6, 7), "ngram", 8)


def learnt(each: float, right: float, tokens: int = 1) -> tuple[Measured, list[Candidate]]:
    """A policy that has seen steps of `tokens` to `tokens` + 8 tokens: a millisecond, and `each` for each
    token; and drafts of which so many were right."""
    policy = Measured()
    for count in range(tokens, tokens + 9):
        for _ in range(STEPS):
            policy.took(count, 0.001 * (1 + each * (count - tokens)))
    candidates = [Candidate(DRAFT, Record()) for _ in range(tokens)]
    for candidate in candidates:
        for _ in range(200):
            candidate.record.count(int(7 * right), int(right < 1))
            policy.verified(candidate, 7, int(7 * right))
    return policy, candidates


def test_drafts_that_are_right_and_cost_little_are_all_tried() -> None:
    policy, candidates = learnt(each=0.02, right=1.0)
    assert policy.choose(1, candidates) == [7]


def test_drafts_that_are_wrong_are_not_tried_where_they_cost() -> None:
    policy, candidates = learnt(each=0.2, right=0.0)
    assert policy.choose(1, candidates) == [0]


def test_drafts_that_are_right_are_not_tried_where_a_token_takes_as_long_as_a_step() -> None:
    policy, candidates = learnt(each=1.5, right=1.0)
    assert policy.choose(1, candidates) == [0]


def test_many_rows_try_no_doubtful_drafts_before_it_is_known_what_they_cost() -> None:
    for rows, tried in ((1, True), (32, False)):
        policy = Measured()
        for _ in range(STEPS):
            policy.took(rows, 0.001)
        assert any(policy.choose(rows, [Candidate(DRAFT, Record()) for _ in range(rows)])) == tried


def test_a_size_that_was_fast_by_chance_does_not_make_drafts_pay() -> None:
    policy, candidates = learnt(each=0.08, right=0.5, tokens=16)
    before = policy.choose(16, candidates)
    policy.took(30, 0.001)  # as fast as without drafts, once
    assert policy.choose(16, candidates) == before


def test_what_was_not_tried_for_long_is_tried_again() -> None:
    _, (candidate,) = learnt(each=0.1, right=0.0)
    fresh = Measured()
    for count in range(1, 10):
        for _ in range(STEPS):
            fresh.took(count, 0.001 * (1 + 0.1 * count))
    tried = [sum(fresh.choose(1, [candidate])) for _ in range(200)]
    assert tried[0] == 0
    assert any(tried)


def test_a_row_whose_drafts_are_wrong_leaves_the_step_to_another() -> None:
    policy, (good, bad) = learnt(each=0.1, right=1.0, tokens=2)
    for _ in range(200):
        bad.record.count(0, 1)
    counts = policy.choose(2, [good, bad])
    assert counts[0] > 3
    assert counts[1] <= 1


@pytest.mark.parametrize("tokens", [1, 8, 63, 64, 200])
def test_a_step_is_never_made_larger_than_what_is_measured(tokens: int) -> None:
    candidates = [Candidate(DRAFT, Record()) for _ in range(4)]
    assert sum(Measured(most=64).choose(tokens, candidates)) <= max(64 - tokens, 0)


def test_looking_for_drafts_rests_for_longer_while_none_is_worth_trying() -> None:
    policy = Measured()
    rests = [policy.rest(32, tried=False) for _ in range(12)]
    assert rests == [0, 0, 0, 1, 2, 4, 8, 16, 32, 62, 62, 62]
    assert policy.rest(32, tried=True) == 0
    assert policy.rest(32, tried=False) == 0


def test_a_single_row_is_always_looked_at() -> None:
    policy = Measured()
    assert not any(policy.rest(1, tried=False) for _ in range(50))


MODEL = Draft((), "model")


def test_the_draft_model_is_asked_for_as_many_tokens_as_its_passes_pay() -> None:
    for seconds, least, most in ((0.0001, 5, 7), (0.0008, 0, 1)):
        policy, _ = learnt(each=0.05, right=1.0)
        candidate = Candidate(MODEL, Record(), promised=7)
        for _ in range(50):
            policy.drafted(1, seconds)
            policy.verified(candidate, 7, 5)
        assert least <= policy.choose(1, [candidate])[0] <= most


def test_a_guess_that_is_there_is_preferred_unless_it_is_far_less_likely() -> None:
    policy, _ = learnt(each=0.05, right=1.0)
    text, model = Candidate(DRAFT, Record()), Candidate(MODEL, Record(), promised=7)
    assert policy.prefer(text, model) is text
    for _ in range(50):
        text.record.count(0, 1)
        model.record.count(7, 0)
    assert policy.prefer(text, model) is model


def test_a_kind_of_draft_that_was_wrong_is_tried_again_after_long() -> None:
    policy, _ = learnt(each=0.2, right=0.0)
    tried = [policy.choose(1, [Candidate(DRAFT, Record())])[0] for _ in range(3000)]
    assert tried[0] == 0
    assert any(tried)


def test_drafts_that_do_not_make_up_for_waiting_are_not_looked_for() -> None:
    def policy(waiting: float) -> Measured:
        made = Measured()
        for _ in range(20):
            made.took(32, 0.020)
            made.took(48, 0.020)
            made.paced(32, 0.021, ahead=True)
            made.paced(32, waiting, ahead=False)
            made.paced(32, 1.0, ahead=False)  # a pause between requests says nothing
        return made

    drafts = [Candidate(Draft((1,), "ngram"), Record()) for _ in range(16)]
    for waiting, rests in ((0.021, False), (0.030, True)):
        made = policy(waiting)
        assert made.choose(32, drafts) == [1] * 16
        assert any(made.rest(32, tried=True) for _ in range(6)) == rests


def test_a_gain_within_the_noise_of_the_estimates_is_not_worth_a_draft() -> None:
    for rows, expected in ((32, [0]), (1, [1])):  # with one draft of 32 rows a step writes 1.6 % more
        made = Measured()
        for _ in range(20):
            made.took(rows, 0.020)
            made.took(rows + 1, 0.020)
        assert made.choose(rows, [Candidate(Draft((1,), "ngram"), Record())]) == expected
