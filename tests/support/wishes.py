"""Requests of all kinds to the bundled model, and their answers without drafts."""

from functools import cache
from typing import Any

import pytest
from bundled import CHOICE, OBJECT, PROMPT, harness, tokenizer
from engine_harness import EngineHarness, Played

from personae.engine.sequence import SequenceLog

VOCAB = tokenizer().vocab_size
WISHES: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_p": 0.9, "seed": 3},
    {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "seed": 4},
    {"presence_penalty": 1.5, "logprobs": 3},
    {"temperature": 1.0, "logit_bias": {17: 4.0, 30: -5.0}, "logprobs": 0, "seed": 5},
    {"temperature": 1.0, "min_tokens": 12, "seed": 6, "eos": tuple(range(40, 90))},
    {"temperature": 1.0, "stop_token_ids": tuple(range(100, 140)), "seed": 7},
    {"temperature": 1.0, "ignore_eos": True, "bad_words_token_ids": ((5, 6), (7,)), "seed": 8},
    {"grammar": OBJECT, "temperature": 1.0, "max_tokens": 120, "seed": 9, "jump_forward": True},
    {"grammar": OBJECT, "temperature": 1.0, "max_tokens": 90, "seed": 10, "jump_forward": False},
    {"grammar": OBJECT, "temperature": 1.0, "max_tokens": 90, "seed": 11, "logprobs": 1},
    {"grammar": OBJECT, "repetition_penalty": 1.2, "max_tokens": 100, "seed": 12},
    {"grammar": CHOICE, "max_tokens": 100, "jump_forward": True},
    {"grammar": CHOICE, "max_tokens": 100, "jump_forward": False, "temperature": 1.0, "seed": 13},
]


def logs(made: EngineHarness) -> list[SequenceLog]:
    found = []
    for number, wish in enumerate(WISHES):
        wish = {"max_tokens": 30, "eos": tokenizer().eos_ids, **wish}
        found.append(made.log(f"{number}", (*PROMPT, number), **wish))
    return found


@cache
def truth() -> dict[str, Played]:
    made = harness()
    return made.play(logs(made))


def agree(found: dict[str, Played], expected: dict[str, Played]) -> None:
    for id, one in expected.items():
        other = found[id]
        assert (other.tokens, other.finish, other.error) == (one.tokens, one.finish, one.error), WISHES[
            int(id)
        ]
        assert [entry.token for entry in other.logprobs] == [entry.token for entry in one.logprobs]
        for mine, theirs in zip(other.logprobs, one.logprobs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert mine.rank == theirs.rank
