"""A draft model changes no token. If it is the model itself, all its drafts are right."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bundled import MODEL, harness, tokenizer
from cut_model import cut_model
from drafting import TINY, check_adapters_answer_as_without, check_all_drafts_are_right, long_logs
from engine_harness import EngineHarness
from tiny_models import model_folder
from wishes import agree, logs, truth

from personae.actors.draft_model import load_draft_model
from personae.actors.options import EngineOptions
from personae.actors.sizing import choose_sizes
from personae.engine.speculation.policy import Always, Measured
from personae.engine.speculation.proposer import Draft
from personae.engine.speculation.speculator import expected_text
from personae.engine.tokens import Tokenizer
from personae.errors import LoadError


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cut_model(tmp_path_factory.mktemp("draft"), MODEL, 2)


@pytest.fixture(scope="module")
def base() -> Path:
    return model_folder("qwen3", num_hidden_layers=2)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"lookahead": 3, "runs_ahead": True},
        {"max_seqs": 4, "max_batch_tokens": 9},
        TINY,
        {**TINY, "runs_ahead": True, "lookahead": 3},
    ],
    ids=str,
)
def test_every_wish_gets_its_tokens_with_a_draft_model(small: Path, sizes: dict[str, Any]) -> None:
    made = harness(policy=Always(), draft=small, propose=expected_text, **sizes)
    agree(made.play(logs(made)), truth())
    agree(made.play(logs(made)), truth())  # from the prefix cache
    made.scheduler.check_integrity()
    assert made.scheduler.counters.draft_tokens > 100
    if "num_pages" in sizes:
        assert made.scheduler.counters.preemptions


def test_a_draft_model_and_guesses_from_the_text_go_together(small: Path) -> None:
    for policy in (Always(), Measured()):
        made = harness(policy=policy, draft=small)
        agree(made.play(logs(made)), truth())


@pytest.mark.parametrize("sizes", [{}, {"max_seqs": 3, "max_batch_tokens": 24}, TINY], ids=str)
def test_all_drafts_are_right_if_the_model_drafts_for_itself(base: Path, sizes: dict[str, Any]) -> None:
    check_all_drafts_are_right(base, base, sizes)


class Sometimes:
    """Guesses wrong tokens, before the draft model is asked, after every third answer token."""

    def __init__(self) -> None:
        self._length = 0

    def extend(self, tokens: Any) -> None:
        self._length += len(tokens)

    def propose(self, most: int) -> Draft | None:
        return Draft((511,) * most, "wrong") if self._length % 3 == 0 else None


def test_the_draft_model_goes_on_rightly_after_wrong_guesses_and_steps_without_it(base: Path) -> None:
    made = EngineHarness(base, policy=Always(), draft=base, propose=lambda log: (Sometimes(),))
    plain = EngineHarness(base)
    found, expected = (each.play(long_logs(each, 6)) for each in (made, plain))
    assert [one.tokens for one in found.values()] == [one.tokens for one in expected.values()]
    counters = made.scheduler.counters
    wrong = counters.draft_tokens - counters.accepted_tokens
    assert counters.accepted_tokens > 100
    assert wrong <= 7 * counters.drafts / 2


def test_a_draft_model_with_a_shorter_context_guesses_as_far_as_that(base: Path, tmp_path: Path) -> None:
    short = cut_model(tmp_path, base, 2, max_position_embeddings=64)
    made = EngineHarness(base, policy=Always(), draft=short, propose=expected_text)
    (log,) = long_logs(made, 1, max_tokens=100)
    plain = EngineHarness(base).play([log])["0"]
    assert made.play([log])["0"].tokens == plain.tokens
    assert 0 < made.scheduler.counters.draft_tokens <= 64 - log.prompt_length


def test_a_draft_model_may_have_more_padding_behind_its_vocabulary(base: Path) -> None:
    padded = model_folder("llama", vocab_size=576, num_hidden_layers=1)
    made = EngineHarness(base, policy=Always(), draft=padded, propose=expected_text)
    plain = EngineHarness(base)
    found, expected = (each.play(long_logs(each, 3)) for each in (made, plain))
    assert [one.tokens for one in found.values()] == [one.tokens for one in expected.values()]
    assert made.scheduler.counters.draft_tokens > 100


def test_adapters_answer_as_without_a_draft_model(base: Path, tmp_path: Path) -> None:
    check_adapters_answer_as_without(base, base, tmp_path)


def test_policy_begins_with_the_draft_model_once_the_answer_is_long_enough_for_its_prompt() -> None:
    assert not Measured().catches_up(lag=500, emitted=1, each=16)
    assert Measured().catches_up(lag=500, emitted=40, each=16)
    assert Measured().catches_up(lag=2, emitted=0, each=16)


def options(**changes: Any) -> EngineOptions:
    return EngineOptions(MODEL, **{"dtype": "float32", "speculate": "draft", **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "--speculate draft needs a second model: --draft-model DIR."),
        ({"speculate": "ngram", "draft_model": MODEL}, "--draft-model needs --speculate draft or"),
        ({"speculate": "off", "draft_model": MODEL}, "--draft-model needs --speculate draft or"),
        ({"draft_model": Path("nowhere")}, "--draft-model nowhere: nowhere has no config.json"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_refused(changes: dict[str, Any], said: str) -> None:
    made = harness()
    with pytest.raises(LoadError) as refused:
        load_draft_model(options(**changes), made.ranks[0].model, tokenizer, made.engine.worker.device)
    assert said in refused.value.message


def test_a_draft_model_with_another_tokenizer_is_refused(base: Path) -> None:
    made = harness()
    with pytest.raises(LoadError) as refused:
        load_draft_model(options(draft_model=base), made.ranks[0].model, tokenizer, made.engine.worker.device)
    assert "This model has other tokens than the served one" in refused.value.message
    assert str(base) in refused.value.message


def test_the_pages_of_both_models_fit_into_the_memory_of_the_cache(small: Path) -> None:
    made = harness()
    model = made.ranks[0].model
    draft = load_draft_model(
        options(draft_model=small), model, partial(Tokenizer.load, MODEL), made.engine.worker.device
    )
    assert draft is not None
    asked = options(kv_memory=2**26)
    alone, both = (
        choose_sizes(asked, model, made.shapes, (), each, device=model.device) for each in (None, draft)
    )
    assert alone.page_bytes == both.page_bytes
    # Two layers of draft for six layers of model.
    assert both.layout.num_pages == pytest.approx(alone.layout.num_pages * 6 / 8, rel=0.01)
