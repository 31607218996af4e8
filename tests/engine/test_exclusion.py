"""Allowed tokens and bad words, against transformers' logits processors and its generation."""

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine_harness import EngineHarness
from hf import hf_model
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_sampler import bitmask
from tiny_models import VOCAB, model_folder
from transformers import LogitsProcessor, NoBadWordsLogitsProcessor, PrefixConstrainedLogitsProcessor

from personae.engine.exclusion import Exclusion
from personae.engine.params import SamplingParams
from personae.engine.sequence import SequenceLog
from personae.grammar.bitmask import words_of

PROMPT = [5, 6, 7]


def allowed_next(exclusion: Exclusion, vocab: int) -> set[int]:
    """What its mask allows, of a bitmask that held something else before."""
    bitmask = np.full((2, words_of(vocab)), 0x5A5A5A5A, np.int32)
    exclusion.fill(bitmask, 1)
    bits = np.unpackbits(bitmask[1].view(np.uint8), bitorder="little")[:vocab]
    return set(np.flatnonzero(bits).tolist())


def allowing(tokens: Iterable[int], vocab: int) -> dict[str, Any]:
    """The parameter that allows nothing else."""
    return {"allowed_tokens": bitmask([np.isin(np.arange(vocab), list(tokens))], vocab).tobytes()}


@settings(max_examples=200)
@given(data=st.data())
def test_at_every_place_it_leaves_out_what_transformers_leaves_out(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([5, 33, 64]))
    few = st.integers(0, min(vocab, 6) - 2)  # so that words begin inside of each other
    words = data.draw(st.lists(st.lists(few, min_size=1, max_size=4), max_size=6))
    allowed = sorted(data.draw(st.sets(st.integers(0, vocab - 1), max_size=vocab)))
    emitted = data.draw(st.lists(few, max_size=12))
    known = data.draw(st.integers(0, len(emitted)))
    fields = allowing(allowed, vocab) if allowed else {}
    params = SamplingParams(50, 0, bad_words_token_ids=tuple(map(tuple, words)), **fields)
    # The prompt holds words that have begun, and does not count.
    log = SequenceLog("s", (*words[0], *emitted[:known]) if words else (0, *emitted[:known]), 0, params)
    log = msgspec.structs.replace(log, prompt_length=len(log.tokens) - known)
    processors: list[LogitsProcessor] = [NoBadWordsLogitsProcessor(words)] if words else []
    if allowed:
        processors.append(PrefixConstrainedLogitsProcessor(lambda *_: allowed, 1))
    exclusion = Exclusion(log, vocab)
    for place in range(known, len(emitted) + 1):
        # Transformers counts every token before, and looks at no word that is longer than these: another
        # token comes first, which is in none of them.
        before = torch.tensor([[vocab - 1, *emitted[:place]]])
        left = torch.ones(vocab, dtype=torch.bool)
        for processor in processors:
            left &= processor(before, torch.zeros(1, vocab))[0].isfinite()
        assert allowed_next(exclusion, vocab) == set(left.nonzero().flatten().tolist())
        if place < len(emitted):
            assert exclusion.accept(emitted[place])


@pytest.fixture(scope="module")
def free() -> list[int]:
    """What the model says by itself."""
    harness = EngineHarness(model_folder("llama"))
    return harness.play([plain(harness)])["a"].tokens


def plain(harness: EngineHarness, **changes: Any) -> SequenceLog:
    return harness.log("a", PROMPT, max_tokens=24, **changes)


@pytest.mark.parametrize(("lookahead", "by_itself"), [(1, False), (2, False), (2, True)])
def test_a_greedy_answer_without_bad_words_is_that_of_transformers(
    free: list[int], lookahead: int, by_itself: bool
) -> None:
    words = [[free[0]], free[3:5], free[6:9], [*free[9:11], free[0]]]
    ids = torch.tensor([PROMPT])
    expected = hf_model(model_folder("llama")).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        bad_words_ids=words,
    )
    harness = EngineHarness(model_folder("llama"), lookahead=lookahead)
    harness.engine.runs_ahead = by_itself
    said = harness.play([plain(harness, bad_words_token_ids=tuple(map(tuple, words)))])["a"].tokens
    assert said == expected[0, len(PROMPT) :].tolist()
    assert said != free


SAMPLED = {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.5}
EXCLUDING: list[dict[str, Any]] = [
    allowing(range(20, 40), VOCAB),
    {"bad_words_token_ids": tuple((a, b) for a in range(20, 40) for b in range(20, 40, 2))},
    {
        **allowing([20, 21, 22], VOCAB),
        "bad_words_token_ids": ((20, 20), (21, 21, 20), (22,)),
        "logit_bias": {20: 5.0, 22: 100.0},
    },
    {**allowing([2, 20, 21], VOCAB), "min_tokens": 9, "logit_bias": {2: 10.0}, "eos": (2,)},
]


@pytest.mark.parametrize("changes", EXCLUDING)
def test_an_answer_keeps_to_what_is_left_and_goes_on_alike_wherever_it_is_taken_up(
    changes: dict[str, Any],
) -> None:
    harness = EngineHarness(model_folder("llama"))
    log = plain(harness, **SAMPLED | changes)
    answer = harness.play([log])["a"]
    said = tuple(answer.tokens)
    assert answer.error is None
    if (allowed := changes.get("allowed_tokens")) is not None:
        assert all(allowed[token // 8] >> token % 8 & 1 for token in said)
    for word in changes.get("bad_words_token_ids", ()):
        assert all(said[at : at + len(word)] != word for at in range(len(said)))
    assert len(said) >= changes.get("min_tokens", 24)
    for count in range(1, len(said)):
        again = msgspec.structs.replace(log, id=f"{count}", tokens=log.tokens + said[:count])
        assert tuple(harness.play([again])[f"{count}"].tokens) == said[count:]


def test_others_in_the_batch_do_not_notice_and_preemption_changes_nothing() -> None:
    roomy = EngineHarness(model_folder("llama"))
    logs = [
        roomy.log(f"{number}", [5 + number] * 20, max_tokens=40, **SAMPLED, **changes)
        for number, changes in enumerate([{}, *EXCLUDING[:3], {}])
    ]
    alone = {log.id: roomy.play([log])[log.id].tokens for log in logs}
    over_quota = EngineHarness(model_folder("llama"), num_pages=14)
    played = over_quota.play(logs)
    assert over_quota.scheduler.counters.preemptions
    assert {id: one.tokens for id, one in played.items()} == alone
