"""Answers of a model that does not want to be bound, over HTTP: whole and valid all the same."""

from pathlib import Path

import anyio
import pytest
import torch
from rich.console import Console

from personae.actors.options import EngineOptions
from personae.api.bundled import DEMO
from personae.engine import step
from personae.engine.params import SamplingParams
from personae.engine.sampler import Sampler
from personae.engine.sequence import SequenceLog
from personae.evals.adversarial.__main__ import SUITE, play, tally
from personae.evals.adversarial.engine import TASTES, Adversary
from personae.evals.harness.records import OutcomeRecord, read_run
from personae.evals.harness.session import EvalOptions
from personae.evals.suites.maskbench import DATA
from personae.grammar.vocabulary import Vocabulary

QUIET = Console(quiet=True)


def played(
    out: Path, *, repeat: int = 1, tool_format: str = "hermes", **settings: object
) -> list[OutcomeRecord]:
    """The records of the suite, put to a server with such a model."""
    texts = {f"{SUITE}.{name}": str(value) for name, value in {"limit": 48, **settings}.items()}
    options = EvalOptions(suites=(SUITE,), out=out, settings=texts, repeat=repeat)
    engine = EngineOptions(DEMO / "model", dtype="float32", max_seqs=16, kv_memory=2**28)
    return read_run(anyio.run(play, options, engine, QUIET, tool_format)).records


def judged(records: list[OutcomeRecord], mode: str) -> list[OutcomeRecord]:
    """What was accepted in a mode; all that was promised of it holds."""
    lines, wrong = tally(records, mode)
    assert wrong == 0, "\n".join(lines)
    return [record for record in records if record.mode == mode and record.scores["accepted"]]


def test_schemas_of_our_own_are_answered_as_promised(tmp_path: Path) -> None:
    records = played(tmp_path, repeat=2)
    assert sum(record.mode != "tools" for record in records) == 120
    strict = judged(records, "strict")
    assert len(strict) == 60
    assert all(record.scores["valid"] for record in strict)
    assert all(record.scores["accepted"] for record in records), "a set of strings of bounded length, too"
    lenient = judged(records, "lenient")
    assert len(lenient) == 60
    assert all(record.scores["whole"] for record in lenient)
    assert len({record.answer for record in strict}) > 40, "tastes differ"


@pytest.mark.parametrize("tool_format", ["hermes", "qwen3_coder", "glm45", "pythonic"])
def test_calls_with_such_arguments_are_whole_and_valid(tmp_path: Path, tool_format: str) -> None:
    records = played(tmp_path, tool_format=tool_format)
    called = judged(records, "tools")
    assert len(called) >= 10
    assert all(record.scores["valid"] for record in called)


@pytest.mark.skipif(not (DATA / "jsonschemabench").is_dir(), reason="the data are not beside the repository")
def test_a_sample_of_maskbench_is_answered_as_promised(tmp_path: Path) -> None:
    records = played(tmp_path, data=DATA / "jsonschemabench", every=60)
    schemas = sum(record.mode == "strict" for record in records)
    assert schemas > 100
    strict, lenient = judged(records, "strict"), judged(records, "lenient")
    assert all(record.scores["valid"] for record in strict)
    assert len(strict) >= 0.9 * schemas
    assert len(lenient) >= 0.99 * schemas


def test_a_server_that_loses_its_masks_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "fill_masks", lambda bitmask, matchers: bitmask.fill_(-1))
    records = played(tmp_path, every=10, limit=1000)  # near its end an answer is looked after anyway
    lines, wrong = tally(records, "strict")
    assert wrong > 0
    assert "rejects the sampled token" in "\n".join(lines)


def test_the_adversary_likes_best_what_is_forbidden_and_least_to_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = (*(b"x" * (1 + token % 7) for token in range(63)), b"")
    sampler = Sampler(4, 64, "cpu")
    adversary = Adversary(sampler, Vocabulary(words, (63,), {}))
    liked: list[torch.Tensor] = []
    sample = sampler.sample
    monkeypatch.setattr(
        sampler, "sample", lambda logits, *rest: liked.append(logits.clone()) or sample(logits, *rest)
    )
    log = SequenceLog("a", (1,), 1, SamplingParams(max_tokens=9, seed=0, temperature=0.0), eos=(63,))
    adversary.admit(2, log)
    allowed = torch.tensor([[0b0111 << 6, -(2**31)]], dtype=torch.int32)  # tokens 6 to 8, and the stop token
    for position in (1, 2):
        chosen = adversary.sample(torch.zeros(1, 64), [2], [position], allowed).read().tokens
        assert chosen == [6], "the longest that is allowed"
        assert int(liked[-1].argmax()) not in (6, 7, 8, 63)
        assert int(liked[-1][0, [6, 7, 8, 63]].argmin()) == 3
    assert not torch.equal(*liked)
    only_stop = torch.tensor([[0, -(2**31)]], dtype=torch.int32)
    assert adversary.sample(torch.zeros(1, 64), [2], [3], only_stop).read().tokens == [63]
    assert next(iter(TASTES)) == "long"
