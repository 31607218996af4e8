"""What tests of draft models and of heads share: long answers, and what holds for whatever drafts."""

import random
from pathlib import Path
from typing import Any

from engine_harness import EngineHarness
from tiny_adapters import make_zoo

from personae.engine.sequence import SequenceLog
from personae.engine.speculation.policy import Always
from personae.engine.speculation.speculator import expected_text

TINY = {"page_size": 4, "num_pages": 60, "max_model_len": 200}
"""Sizes with which sequences are preempted."""


def long_logs(made: EngineHarness, count: int, **changes: Any) -> list[SequenceLog]:
    """Greedy answers of 40 tokens to prompts of many lengths; some share their beginning."""
    rng = random.Random(5)
    shared = rng.choices(range(4, 500), k=40)
    prompts = [
        [*(shared[: 7 * (n % 6)]), *rng.choices(range(4, 500), k=rng.randint(1, 60))] for n in range(count)
    ]
    changes = {"max_tokens": 40, "ignore_eos": True, **changes}
    return [made.log(f"{number}", prompt, **changes) for number, prompt in enumerate(prompts)]


def check_all_drafts_are_right(base: Path, draft: Path, sizes: dict[str, Any]) -> None:
    """With drafts by one that knows its answers, a model gives the same tokens in half the steps or fewer."""
    made = EngineHarness(base, policy=Always(), draft=draft, propose=expected_text, **sizes)
    plain = EngineHarness(base, **sizes)
    for _ in range(2):  # the second time from the prefix cache
        found, expected = (each.play(long_logs(each, 9)) for each in (made, plain))
        assert {id: one.tokens for id, one in found.items()} == {
            id: one.tokens for id, one in expected.items()
        }
    counters = made.scheduler.counters
    assert counters.accepted_tokens >= 0.98 * counters.draft_tokens > 200
    assert made.steps < plain.steps / 2
    assert counters.preemptions or "num_pages" not in sizes


def check_adapters_answer_as_without(base: Path, draft: Path, path: Path) -> EngineHarness:
    """Adapters, which are made below `path`, give the same tokens with drafts. Returns what drafted."""
    adapters = make_zoo(path, base, ("rank-1", "rank-64"))
    played = []
    for settings in ({}, {"policy": Always(), "draft": draft}):
        made = EngineHarness(base, adapters, **settings)
        asked = [
            made.log(f"{name} {number}", [*log.tokens], name, max_tokens=24, temperature=0.8, seed=number)
            for number, log in enumerate(long_logs(made, 3))
            for name in (None, *adapters)
        ]
        played.append([one.tokens for one in made.play(asked).values()])
    assert played[0] == played[1]
    return made
