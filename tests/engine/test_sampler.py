from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samplers import sample, sequence, token
from slow_sampler import bitmask, changed_logits, may_choose

from personae.engine.logprobs import prompt_logprobs
from personae.engine.params import SamplingParams
from personae.engine.plan import NOT_FINITE, NOTHING_ALLOWED
from personae.engine.sampled_tokens import TokenChoices
from personae.engine.sampler import Sampler
from personae.engine.sequence import SequenceLog

INF = float("inf")


finite = st.floats(-2, 2, width=32)


@st.composite
def requests(draw: st.DrawFn, vocab: int) -> SequenceLog:
    tokens = draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=12))
    ids = st.integers(0, vocab - 1)
    params = SamplingParams(
        max_tokens=1000,
        seed=draw(st.integers(-(2**63), 2**64)),
        temperature=draw(st.sampled_from([0.0, 1e-6, 0.3, 1.0, 1.0, 2.0])),
        top_p=draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0, 1.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 50, 90, 10_000])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0])),
        presence_penalty=draw(st.one_of(st.just(0.0), finite)),
        frequency_penalty=draw(st.one_of(st.just(0.0), finite)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.5, 1.3])),
        logit_bias=draw(st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=3)),
        min_tokens=draw(st.integers(0, 14)),
        stop_token_ids=tuple(draw(st.lists(ids, max_size=2))),
        ignore_eos=draw(st.booleans()),
    )
    prompt_length = draw(st.integers(1, len(tokens)))
    return SequenceLog("s", tuple(tokens), prompt_length, params, tuple(draw(st.lists(ids, max_size=2))))


@settings(max_examples=150)
@given(data=st.data())
def test_it_chooses_what_a_slow_sampler_chooses_over_several_steps(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([5, 64, 65, 300, 1024]))
    logs = data.draw(st.lists(requests(vocab), min_size=1, max_size=5))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rounding = data.draw(st.sampled_from([1, 4, 10_000]))  # coarse logits tie
    newest = torch.zeros(8, dtype=torch.int64)
    sampler = Sampler(8, vocab, "cpu", newest.__setitem__)
    slots = random.permutation(8)[: len(logs)].tolist()
    for slot, log in zip(slots, logs, strict=True):
        sampler.admit(slot, log)
    for _ in range(4):
        logits = np.round(random.normal(0, 3, (len(logs), vocab)) * rounding).astype(np.float32) / rounding
        allowed = [random.random(vocab) < 0.5 if random.random() < 0.4 else None for _ in logs]
        mask = (
            torch.from_numpy(bitmask(allowed, vocab)) if any(bits is not None for bits in allowed) else None
        )
        positions = [len(log.tokens) for log in logs]
        choices = sampler.sample(torch.from_numpy(logits.astype(np.float32)), slots, positions, mask).read()
        following = []
        for row, log in enumerate(logs):
            x = changed_logits(logits[row].astype(np.float32), log, allowed[row])
            got = choices.tokens[row]
            if x.max() == -INF:
                assert choices.failures[row] == NOTHING_ALLOWED
                return
            assert got in may_choose(x, log.params, positions[row])
            assert int(newest[slots[row]]) == got
            following.append(
                SequenceLog("s", (*log.tokens, int(got or 0)), log.prompt_length, log.params, log.eos)
            )
        logs = following


@settings(max_examples=60)
@given(data=st.data())
def test_a_row_alone_gets_the_token_that_it_gets_in_a_batch(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([65, 1024, 5000]))
    logs = data.draw(st.lists(requests(vocab), min_size=2, max_size=6))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = torch.from_numpy(random.normal(0, 3, (len(logs), vocab)).astype(np.float32))
    allowed = [random.random(vocab) < 0.9 if random.random() < 0.3 else None for _ in logs]
    together = sample(logits, logs, allowed=allowed)
    for row, log in enumerate(logs):
        alone = sample(logits[row : row + 1], [log], allowed=[allowed[row]])
        assert alone.tokens[0] == together.tokens[row]


@pytest.mark.parametrize("vocab", [65, 1000, 4096, 50257])
@pytest.mark.parametrize("rows", [2, 3, 8])
def test_a_rows_weights_and_sums_have_the_same_bits_alone_and_in_a_batch(vocab: int, rows: int) -> None:
    from personae.kernels import reference_sampler

    torch.manual_seed(vocab + rows)
    x = torch.randn(rows, vocab) * 3
    temperatures = torch.full((rows, 1), 0.7)

    def stages(x: torch.Tensor, temperature: torch.Tensor) -> list[torch.Tensor]:
        weights = x.sub(reference_sampler.greatest(x)[0][:, None]).div_(temperature).exp_()
        top_p = torch.full((len(x),), 0.9, dtype=torch.float64)
        floor = reference_sampler.thresholds(weights, torch.zeros(len(x), dtype=torch.int64), top_p)
        return [weights, reference_sampler._edges(weights), floor, torch.log_softmax(x, 1)]

    together = stages(x, temperatures)
    for row in range(rows):
        one = slice(row, row + 1)
        for alone, batch in zip(stages(x[one], temperatures[one]), together, strict=True):
            assert torch.equal(alone[0], batch[row])


@settings(max_examples=40)
@given(data=st.data())
def test_a_preempted_sequence_goes_on_as_if_it_had_not_been(data: st.DataObject) -> None:
    vocab = 80
    log = data.draw(requests(vocab))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    steps = torch.from_numpy(random.normal(0, 2, (8, 1, vocab)).astype(np.float32))
    cut = data.draw(st.integers(1, 7))

    def run(preempt: bool) -> list[int | None]:
        sampler = Sampler(2, vocab, "cpu")
        sampler.admit(0, log)
        slot, tokens = 0, list(log.tokens)
        for step, logits in enumerate(steps):
            if preempt and step == cut:
                sampler.release(0)
                sampler.admit(1, SequenceLog("s", tuple(tokens), log.prompt_length, log.params, log.eos))
                slot = 1
            tokens.append(sampler.sample(logits.clone(), [slot], [len(tokens)]).read().tokens[0] or 0)
        return tokens

    assert run(preempt=True) == run(preempt=False)


def test_a_slot_used_again_remembers_nothing() -> None:
    logits = torch.zeros(1, 70)
    logits[0, :3] = torch.tensor([3.0, 2.5, 2.0])
    first = sequence(
        [0, 1], 1, temperature=0, logit_bias={1: -50.0}, presence_penalty=2, min_tokens=9, eos=[2]
    )
    sampler = Sampler(1, 70, "cpu")
    sampler.admit(0, first)
    sampler.sample(logits.clone(), [0], [2])
    sampler.release(0)
    sampler.admit(0, sequence([1, 2], temperature=0, frequency_penalty=0.1, logprobs=None))
    choices = sampler.sample(logits.clone(), [0], [2]).read()
    assert choices.tokens == [0]
    assert choices.logprobs == {}


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 128, 1000])
def test_greedy_is_argmax_and_the_lowest_id_wins_a_tie(vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randint(-3, 4, (40, vocab)).float()
    expected = [int(np.argmax(row)) for row in logits.numpy()]
    assert sample(logits, [sequence(temperature=0)] * 40).tokens == expected
    assert sample(logits, [sequence(temperature=1e-9)] * 40).tokens == expected
    assert sample(logits, [sequence(top_k=1)] * 40).tokens == expected


def test_seed_and_position_decide_the_token_and_nothing_else_does() -> None:
    logits = [0.0] * 1000
    run = [token(logits, at, seed=5) for at in range(40)]
    assert run == [token(logits, at, seed=5) for at in range(40)]
    assert len(set(run)) > 35
    assert sum(a == b for a, b in zip(run, [token(logits, at, seed=6) for at in range(40)], strict=True)) < 3


def test_neither_eos_nor_stop_ids_come_before_min_tokens() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    params: dict[str, Any] = {"temperature": 0, "min_tokens": 2, "stop_token_ids": (0,), "eos": [1]}
    assert sample(logits, [sequence([2, 2], 1, **params)]).tokens == [2]
    assert sample(logits, [sequence([2, 2, 2], 1, **params)]).tokens == [0]
    assert sample(logits, [sequence([2, 2], 1, **params, ignore_eos=True)]).tokens == [1]


def test_a_grammar_that_has_ended_ends_before_min_tokens() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    log = sequence([2, 2], 1, temperature=0, min_tokens=9, eos=[0])
    ended, going_on = np.array([True, False, False]), np.array([True, False, True])
    assert sample(logits, [log, log], allowed=[ended, going_on]).tokens == [0, 2]


def test_a_grammars_mask_comes_before_greedy_and_random_choice_and_other_rows_do_not_notice() -> None:
    logits = torch.zeros(4, 70)
    logits[:, 69] = 5
    logits[:, 3] = 4
    only = np.zeros(70, np.bool_)
    only[[3, 40]] = True
    logs = [sequence(temperature=0), sequence(temperature=0), sequence(top_p=0.5), sequence(top_p=0.5)]
    choices = sample(logits, logs, allowed=[only, None, only, None])
    assert choices.tokens == [3, 69, 3, 69]


def test_a_row_without_an_allowed_token_or_with_logits_that_are_not_finite_fails_alone() -> None:
    logits = torch.zeros(6, 70)
    logits[:, 5] = 20
    logits[1, 7] = float("nan")
    logits[2, 8] = INF
    logits[3, :] = -INF
    logits[4, 69] = -INF
    nothing = np.zeros(70, np.bool_)
    for params in ({"temperature": 0}, {"top_p": 0.3}, {"top_k": 3}, {"temperature": 0, "logprobs": 2}):
        logs = [sequence(**params)] * 6
        choices = sample(logits, logs, allowed=[None, None, None, None, None, nothing])
        assert choices.tokens == [5, None, None, None, 5, None]
        assert choices.failures == {1: NOT_FINITE, 2: NOT_FINITE, 3: NOTHING_ALLOWED, 5: NOTHING_ALLOWED}
        assert set(choices.logprobs) <= {0, 4}


def test_a_failed_row_leaves_a_valid_token_for_the_step_that_is_already_under_way() -> None:
    newest = torch.full((2,), -1)
    sampler = Sampler(2, 70, "cpu", newest.__setitem__)
    for slot in range(2):
        sampler.admit(slot, sequence())
    sampler.sample(torch.full((2, 70), float("nan")), [0, 1], [1, 1])
    assert (newest < 70).all()
    assert (newest >= 0).all()


def test_logits_may_be_anything_where_a_word_of_the_mask_allows_nothing() -> None:
    logits = torch.zeros(1, 70)
    logits[0, 3], logits[0, 32:64] = 1, torch.nan
    first = np.zeros(70, np.bool_)
    first[[3, 4, 66]] = True
    for params in ({"temperature": 0}, {"top_k": 1}, {"temperature": 0.01, "top_p": 0.5}):
        assert sample(logits, [sequence(**params)], allowed=[first]).tokens == [3]


def test_logprobs_are_those_of_the_raw_logits_and_only_rows_that_asked_have_them() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 200)
    logs = [
        sequence(logprobs=3, temperature=0, logit_bias={7: 100.0}),
        sequence(),
        sequence(logprobs=0, top_p=0.5),
        sequence(logprobs=20, seed=3, temperature=1.5),
    ]
    choices = sample(logits, logs)
    assert set(choices.logprobs) == {0, 2, 3}
    assert choices.tokens[0] == 7
    for row, entry in choices.logprobs.items():
        expected = torch.log_softmax(logits[row], 0)
        assert entry.token == choices.tokens[row]
        assert entry.logprob == float(expected[entry.token])
        assert entry.rank == 1 + int((logits[row] > logits[row, entry.token]).sum())
        values, ids = expected.topk(logs[row].params.logprobs or 0)
        assert list(entry.top) == list(zip(ids.tolist(), values.tolist(), strict=True))


def test_named_tokens_are_looked_up_in_place_of_the_likeliest_and_other_rows_do_not_notice() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 200)
    logs = [
        sequence(logprobs=3, temperature=0),
        sequence(logprobs=0, logprob_tokens=(199, 0, 7)),
        sequence(),
        sequence(logprobs=20, logprob_tokens=(5,), temperature=0),
    ]
    plain = sample(logits, [sequence(logprobs=3, temperature=0)] * 4)
    entries = sample(logits, logs).logprobs
    expected = torch.log_softmax(logits, 1)
    assert entries[0] == plain.logprobs[0]
    assert entries[1].top == tuple((token, float(expected[1, token])) for token in (199, 0, 7))
    assert entries[3].top == ((5, float(expected[3, 5])),)
    assert (entries[3].token, entries[3].rank) == (plain.tokens[3], 1)


def test_of_equal_logprobs_the_lower_id_comes_first_so_a_greedy_token_leads() -> None:
    logits = torch.zeros(1, 300)
    logits[0, 100:250] = 4
    entry = sample(logits, [sequence(temperature=0, logprobs=5)]).logprobs[0]
    assert entry.token == 100
    assert entry.rank == 1
    assert [id for id, _ in entry.top] == [100, 101, 102, 103, 104]


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    entry = sample(torch.tensor([[1.0, 2.0, 3.0]]), [sequence(temperature=0, logprobs=20)]).logprobs[0]
    assert [id for id, _ in entry.top] == [2, 1, 0]


def test_prompt_logprobs_are_log_softmax_at_the_targets() -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, 90)
    targets = torch.randint(0, 90, (6,))
    entries = prompt_logprobs(logits, targets, 2).read([2] * 6)
    expected = torch.log_softmax(logits, 1)
    for row, entry in enumerate(entries):
        assert entry.token == int(targets[row])
        assert entry.logprob == float(expected[row, targets[row]])
        assert entry.rank == 1 + int((logits[row] > logits[row, targets[row]]).sum())
        assert [id for id, _ in entry.top] == expected[row].topk(2).indices.tolist()
    assert prompt_logprobs(logits[:0], targets[:0], 2).read([]) == []


def test_an_empty_step_chooses_nothing() -> None:
    sampler = Sampler(2, 70, "cpu")
    assert sampler.sample(torch.zeros(0, 70), [], []).read() == TokenChoices([])


def test_sampling_into_a_free_slot_is_a_bug() -> None:
    sampler = Sampler(2, 70, "cpu")
    with pytest.raises(AssertionError, match="free"):
        sampler.sample(torch.zeros(1, 70), [1], [1])
    sampler.admit(1, sequence())
    with pytest.raises(AssertionError, match="taken"):
        sampler.admit(1, sequence())
