"""Random traffic on an engine that is too small for it says what each request says alone."""

from collections import Counter
from typing import Any

import pytest
from marks import long

from personae.api.bundled import DEMO
from personae.engine.kv import KVCache
from personae.engine.sequence import TokenLogprobs
from personae.evals.isolation.__main__ import ROUNDING, WAYS, StreamDifference, difference, judged, play
from personae.evals.isolation.fixture import EngineFixture, ObservedStream
from personae.kernels.cpu import operators

SEEDS = {"bfloat16": (0, 6, 12, 15, 78), "float32": (3, 7)}
DISTURBS = {
    "bfloat16": {"cached tokens", "preemptions", "jumped tokens", "losses", "left", "adapters evicted"},
    "float32": {"cached tokens"},
}
MOST = 16  # further seeds: which tokens an answer has, and so what happens, depends on the processor
exact = pytest.mark.skipif("fuse" not in operators(), reason="no compiler, or no AVX-512 on this machine")


@pytest.fixture(
    scope="module",
    params=[pytest.param("bfloat16", marks=exact), long("float32")],
)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def fixture(way: str) -> EngineFixture:
    return EngineFixture(DEMO / "model", [DEMO / "adapters"], *WAYS[way])


def test_every_stream_is_what_it_is_alone(fixture: EngineFixture, way: str) -> None:
    happened: Counter[str] = Counter()
    differ: list[StreamDifference] = []
    for count, seed in enumerate((*SEEDS[way], *range(100, 100 + MOST))):
        if count >= len(SEEDS[way]) and DISTURBS[way] <= happened.keys():
            break
        found, what = play(fixture, seed, 12, ROUNDING if way == "float32" else 0.0)
        differ += found
        happened += what
    assert not judged(differ, happened["tokens"], ROUNDING if way == "float32" else 0.0), differ
    assert happened.keys() >= DISTURBS[way], "it does not show all"


def test_a_tier_that_fails_now_and_then_changes_no_stream(fixture: EngineFixture, way: str) -> None:
    happened: Counter[str] = Counter()
    differ: list[StreamDifference] = []
    rounding = ROUNDING if way == "float32" else 0.0
    for seed in range(MOST):
        found, what = play(fixture, seed, 8, rounding, tier_fails=0.1)
        differ += found
        happened += what
        if happened["tokens from the tier"] > 50:
            break
    assert not judged(differ, happened["tokens"], rounding), differ
    assert happened["tokens from the tier"] > 50, "it shows nothing of the tier"


def test_a_page_that_is_not_fetched_is_seen(fixture: EngineFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "write_pages", lambda kv, pages, content: None)
    assert any(play(fixture, seed, 8, ROUNDING, tier_fails=0.0)[0] for seed in range(MOST))


def test_drafts_of_a_model_change_no_stream(way: str) -> None:
    model = DEMO / "model"
    drafting = EngineFixture(model, [DEMO / "adapters"], *WAYS[way], model)
    rounding = ROUNDING if way == "float32" else 0.0
    differ, happened = play(drafting, 3, 8, rounding, "draft")
    assert not judged(differ, happened["tokens"], rounding), differ
    assert happened["right drafts of model"] > 10, "it shows nothing of drafts"


def test_a_page_that_is_not_copied_is_seen(fixture: EngineFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "copy_pages", lambda kv, copies: None)
    assert any(play(fixture, seed, 12, ROUNDING)[0] for seed in (12, 13))


@pytest.mark.parametrize(
    ("found", "left", "rounding", "what"),
    [
        ({}, False, 0.0, None),
        ({"tokens": [5, 6, 9]}, False, 0.0, "token 2 is 9, alone 7"),
        ({"tokens": [5, 6]}, False, 0.0, "tokens: 2, alone 3"),
        ({"tokens": [5, 6], "end": None}, True, 0.0, None),
        ({"tokens": [5, 6, 7, 8]}, True, 0.0, "tokens: 4, alone 3"),
        ({"end": ("stop", None)}, False, 0.0, "it ended"),
        ({"logprobs": [TokenLogprobs(5, -1.00001, 1)]}, False, 0.0, "logprob of token 0"),
        ({"logprobs": [TokenLogprobs(5, -1.00001, 1)]}, False, ROUNDING, None),
        ({"logprobs": [TokenLogprobs(6, -1.0, 1)]}, False, ROUNDING, "logprob of token 0"),
        ({"prompt_logprobs": []}, False, ROUNDING, "logprob of prompt tokens: 0, alone 1"),
    ],
)
def test_the_first_difference_is_told(
    found: dict[str, Any], left: bool, rounding: float, what: str | None
) -> None:
    alone: dict[str, Any] = {
        "tokens": [5, 6, 7],
        "logprobs": [TokenLogprobs(5, -1.0, 1)],
        "prompt_logprobs": [None],
        "end": ("length", None),
    }
    delivered = difference("a", ObservedStream(**alone | found), ObservedStream(**alone), rounding, left=left)
    assert (None if delivered is None else delivered.what[: len(what or "")]) == what


def test_rounding_may_choose_a_token_now_and_then_and_in_float32_alone() -> None:
    chosen, short = StreamDifference("a", "token 1", chosen=True), StreamDifference("b", "tokens: 1")
    assert judged([chosen, short], 12_000, ROUNDING) == 1
    assert judged([chosen] * 3, 12_000, ROUNDING) == 1
    assert judged([chosen], 12_000, 0.0) == 1
