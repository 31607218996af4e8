"""How many prompts of a request go to the engine at a time, and what is no answer to them."""

import math
import struct
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import fake_engine
import pytest
from asgi import client
from fake_engine import FakeEngine, FakeStream

from personae.api.app import create_app
from personae.api.completions import GivenPrompt
from personae.api.embeddings.prompts import WINDOW, WINDOW_TOKENS, windows
from personae.engine.sequence import SequenceLog


def prompts(*lengths: int) -> list[GivenPrompt]:
    return [GivenPrompt([1] * length, "", "input") for length in lengths]


def test_a_window_has_few_prompts_and_few_tokens() -> None:
    assert list(windows(prompts(*[1] * 5), 2)) == [(0, 2), (2, 4), (4, 5)]
    half = WINDOW_TOKENS // 2
    lengths = (half, half, 1, half, WINDOW_TOKENS + 1, 1)
    assert list(windows(prompts(*lengths), 64)) == [(0, 2), (2, 4), (4, 5), (5, 6)]


class CountingEngine(FakeEngine):
    """Knows how many sequences each submission had."""

    counts: tuple[int, ...] = ()

    def stream(self, logs: Sequence[SequenceLog]) -> AbstractAsyncContextManager[FakeStream]:
        self.counts = (*self.counts, len(logs))
        return super().stream(logs)


@pytest.mark.anyio
async def test_a_flood_of_texts_reaches_the_engine_in_windows() -> None:
    engine = CountingEngine()
    async with client(create_app(engine)) as asking:
        asked = {"model": "base", "input": ["hi"] * (2 * WINDOW + 1)}
        answer = await asking.post("/v1/embeddings", json=asked)
    assert answer.status_code == 200, answer.text
    assert [row["index"] for row in answer.json()["data"]] == list(range(2 * WINDOW + 1))
    assert engine.counts == (WINDOW, WINDOW, 1)


@pytest.mark.anyio
@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
async def test_a_vector_that_an_adapter_s_overflow_leaves_is_no_answer(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fake_engine.vector_of
    left = struct.pack("<8f", *[value] * 8)
    engine = FakeEngine()
    bad = tuple(engine.tokenizer.encode("b"))
    monkeypatch.setattr(fake_engine, "vector_of", lambda log: left if log.tokens[:1] == bad else made(log))
    async with client(create_app(engine)) as asking:
        body = {"model": "team/pirate", "input": ["a", "b"]}
        refused = await asking.post("/v1/embeddings", json=body)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["code"] == "adapter_overflow"
    assert "`input[1]`" in refused.json()["error"]["message"]
