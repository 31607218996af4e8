"""`GET /v1/stats`: what the console's page Live is drawn from."""

import re
from typing import Any

import anyio
import asgi
import pytest
from fake_engine import FakeEngine

from personae.actors.client import EngineStats, QueueStats
from personae.api.app import create_app
from personae.api.console.kept import SECONDS
from personae.api.console.live import DRAWN, MOST_QUEUES
from personae.api.console.pages import STATIC
from personae.engine.stats import StepSample

pytestmark = pytest.mark.anyio


async def stats(engine: FakeEngine, *asked: str) -> dict[str, Any]:
    """The answer, after completions by these models."""
    async with asgi.client(create_app(engine)) as client:
        for model in asked:
            await client.post("/v1/completions", json={"model": model, "prompt": "hi"})
        answer = await client.get("/v1/stats")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


async def test_the_last_steps_and_the_memory_of_the_engine_are_shown(engine: FakeEngine) -> None:
    steps = (StepSample(1, 4, 40, 0.25, 0.01), StepSample(2, 1, 1, 0.02))
    engine.figures = EngineStats(
        running=3, waiting=1, pages_total=10, pages_used=4, pages_lent=2, restarts=1, recent_steps=steps
    )
    found = await stats(engine)
    assert found["max_replicas"] == 1
    assert found["engines"] == [
        {
            "id": "0",
            "status": "ready",
            "running": 3,
            "waiting": 1,
            "restarts": 1,
            "kv_pages": 10,
            "kv_pages_used": 4,
            "kv_pages_lent": 2,
            "steps": [[1, 4, 40, 0.25, 0.01], [2, 1, 1, 0.02, 0.0]],
            "error": None,
        }
    ]
    engine.figures = EngineStats(ready=False)
    assert (await stats(engine))["engines"][0]["status"] == "starting"


async def test_queues_name_tenants_and_adapters_and_are_bounded(engine: FakeEngine) -> None:
    idle = [QueueStats(f"tenant-{number}", None, tokens=number) for number in range(3 * MOST_QUEUES)]
    engine.figures = EngineStats(queues=(*idle, QueueStats("ann", "d" * 64, 1, 2, 3)))
    queues = (await stats(engine))["queues"]
    assert queues[0] == {"tenant": "ann", "adapter": "team/pirate", "running": 1, "waiting": 2, "tokens": 3}
    assert queues[1]["tokens"] == 3 * MOST_QUEUES - 1
    assert len(queues) == MOST_QUEUES


async def test_an_answer_does_not_grow_with_the_number_of_models_that_were_asked(engine: FakeEngine) -> None:
    one = (await stats(engine, "base"))["samples"]
    two = (await stats(engine, "base", "team/pirate"))["samples"]
    assert [*map(len, one.values())] == [*map(len, two.values())]
    assert one["vllm:generation_tokens_total"][0]["value"] == 14
    assert two["vllm:generation_tokens_total"] == [{"labels": {}, "value": 28}]


async def test_many_consoles_cost_one_answer_a_second(engine: FakeEngine, monkeypatch: Any) -> None:
    made: list[float] = []
    figures = engine.stats

    def counted() -> EngineStats:
        made.append(anyio.current_time())
        return figures()

    async with asgi.client(create_app(engine)) as client:
        await client.get("/v1/stats")
        monkeypatch.setattr(engine, "stats", counted)
        clock = anyio.current_time() + SECONDS
        monkeypatch.setattr(anyio, "current_time", lambda: clock)
        await client.get("/v1/stats")
        once = len(made)
        assert once > 0
        engine.figures = EngineStats(running=7)
        clock += 0.999 * SECONDS
        kept = [(await client.get("/v1/stats")).json() for _ in range(40)]
        assert len(made) == once
        assert kept[0]["engines"][0]["running"] == 0
        clock += 0.002 * SECONDS
        assert (await client.get("/v1/stats")).json()["engines"][0]["running"] == 7
        assert len(made) == 2 * once


async def test_an_answer_has_the_metrics_that_the_page_draws_and_no_others(engine: FakeEngine) -> None:
    page = (STATIC / "live.js").read_text(encoding="utf-8")
    named = set(re.findall(r'"((?:vllm|personae):[a-z_]+)"', page))
    assert {name.removesuffix("_total") for name in named} == DRAWN
    answered = {re.sub(r"_(total|bucket|count|sum)$", "", name) for name in (await stats(engine))["samples"]}
    assert answered <= DRAWN
    assert {name.removesuffix("_total") for name in named if name.startswith("personae:")} <= answered
