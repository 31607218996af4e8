"""What each parameter of a request does to the choice of a token."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samplers import chosen, sample, sequence, token
from slow_sampler import kept, may_choose
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper

from personae.engine.sampler import Sampler


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 1.7},
        {"top_p": 0.8},
        {"top_k": 5},
        {"min_p": 0.2},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "temperature": 0.8},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab", [12, 130])
def test_tokens_are_distributed_as_the_filtered_softmax_says(params: dict[str, Any], vocab: int) -> None:
    chi_square, limit = goodness_of_fit(vocab, params, expected=params)
    assert chi_square < limit


def test_the_distribution_test_notices_a_temperature_ten_percent_off() -> None:
    chi_square, limit = goodness_of_fit(130, {"temperature": 1.1}, expected={"temperature": 1.0})
    assert chi_square > limit


def goodness_of_fit(vocab: int, params: dict[str, Any], expected: dict[str, Any]) -> tuple[float, float]:
    """Pearson's statistic over many seeds and positions, and what a right sampler exceeds once in 30,000."""
    rows, steps = 64, 200
    logits = torch.from_numpy(np.random.default_rng(vocab).normal(0, 1.5, vocab).astype(np.float32))
    sampler = Sampler(rows, vocab, "cpu")
    for slot in range(rows):
        sampler.admit(slot, sequence(seed=slot, **params))
    counts = torch.zeros(vocab, dtype=torch.int64)
    for step in range(steps):
        tokens = sampler.sample(logits.repeat(rows, 1), range(rows), [step] * rows).tokens
        counts += torch.bincount(tokens, minlength=vocab)
    law = sequence(**expected).params
    wanted = kept(logits.numpy(), law, law.top_p) * rows * steps
    assert counts[wanted == 0].sum() == 0
    often = wanted >= 5
    observed = np.append(counts.numpy()[often], counts.numpy()[~often].sum())
    wanted = np.append(wanted[often], wanted[~often].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    tail = 2 / (9 * freedom)  # Wilson and Hilferty's approximation, four standard deviations out
    return float(((observed - wanted) ** 2 / wanted).sum()), freedom * (1 - tail + 4 * tail**0.5) ** 3


def test_top_k_keeps_the_k_largest_and_ties_with_the_last() -> None:
    assert chosen([1.0, 0.9, 0.8, 0.7, 0.6], top_k=3) == {0, 1, 2}
    assert chosen([1.0, 0.8, 0.8, 0.8, 0.6], top_k=2) == {0, 1, 2, 3}
    assert chosen([0.0, 0.1, 0.2], top_k=3) == {0, 1, 2}
    warped = TopKLogitsWarper(2)(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[1.0, 0.8, 0.8, 0.6]]))
    assert chosen([1.0, 0.8, 0.8, 0.6], top_k=2) == set(warped[0].isfinite().nonzero().flatten().tolist())


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert chosen(logits, top_p=0.39) == {0}
    assert chosen(logits, top_p=0.41) == {0, 1}
    assert chosen(logits, top_p=0.71) == {0, 1, 2}
    assert chosen(logits, top_p=0.95) == {0, 1, 2, 3}
    assert chosen(logits, top_p=0.0) == {0}


def test_top_p_is_measured_against_what_top_k_left() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert chosen(logits, top_p=0.5) == {0, 1}
    assert chosen(logits, top_p=0.5, top_k=2) == {0}


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
def test_a_nucleus_of_thousands_of_tokens_is_exact(spread: float) -> None:
    """Few candidates are not enough here: rows are sorted entirely, but for the last, which is peaked."""
    vocab = 6000
    random = np.random.default_rng(1)
    logits = (random.normal(0, 1, (3, vocab)) * [[spread], [spread], [20.0]]).astype(np.float32)
    logs = [sequence(top_p=0.9, seed=seed) for seed in range(3)]
    for at in range(20):
        tokens = sample(torch.from_numpy(logits), logs, [at] * 3).tokens
        for row, log in enumerate(logs):
            assert tokens[row] in may_choose(logits[row], log.params, at)


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest() -> None:
    logits = np.log([0.5, 0.3, 0.15, 0.05]).tolist()
    assert chosen(logits, min_p=0.35) == {0, 1}
    assert chosen(logits, min_p=0.25) == {0, 1, 2}
    assert chosen(logits, min_p=1.0) == {0}


def test_a_low_temperature_prefers_the_likeliest_and_a_high_one_levels() -> None:
    logits = [1.0, 0.0, 0.0, 0.0]
    assert chosen(logits, temperature=0.05) == {0}
    assert chosen(logits, temperature=50.0) == {0, 1, 2, 3}


def test_presence_and_frequency_penalties_count_emitted_tokens_only() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.0]])
    assert sample(logits, [sequence([0, 0], 2, temperature=0, presence_penalty=0.5)]).tokens == [0]
    assert sample(logits, [sequence([2, 0], 1, temperature=0, presence_penalty=0.5)]).tokens == [1]
    assert sample(logits, [sequence([2, 0], 1, temperature=0, frequency_penalty=0.05)]).tokens == [0]
    assert sample(logits, [sequence([2, 0, 0, 0], 1, temperature=0, frequency_penalty=0.05)]).tokens == [1]
    assert sample(logits, [sequence([1, 2], 1, temperature=0, frequency_penalty=-2)]).tokens == [2]


def test_penalties_count_the_tokens_that_the_sampler_itself_chose() -> None:
    sampler = Sampler(1, 3, "cpu")
    sampler.admit(0, sequence([2], temperature=0, frequency_penalty=0.4))
    row = torch.tensor([[1.0, 0.9, 0.0]])
    tokens = [sampler.sample(row.clone(), [0], [1 + n]).read().tokens[0] for n in range(6)]
    assert tokens == [0, 1, 0, 1, 0, 1]


@settings(max_examples=50)
@given(st.floats(0.1, 3.0), st.integers(0, 2**32))
def test_repetition_penalty_is_that_of_transformers(penalty: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.normal(0, 2, (1, 40)).astype(np.float32))
    tokens = random.integers(0, 40, 12).tolist()
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)])
    expected = processors(torch.tensor([tokens]), logits.clone())
    changed = logits.clone()
    sampler = Sampler(1, 40, "cpu")
    sampler.admit(0, sequence(tokens, 5, temperature=0, repetition_penalty=penalty))
    sampler.sample(changed, [0], [12])
    torch.testing.assert_close(changed, expected)


def test_logit_bias_is_added() -> None:
    assert token([1.0, 0.0, 0.0], temperature=0, logit_bias={2: 1.5}) == 2
    assert chosen([1.0, 1.0, 1.0], logit_bias={0: -100.0, 1: -100.0}) == {2}
    with pytest.raises(ValueError, match="outside the vocabulary"):
        token([1.0, 0.0], logit_bias={2: 1.0})
