"""`GET /v1/stats/history`: the last hour, which the page Live draws when it is opened."""

from typing import Any

import anyio
import anyio.lowlevel
import asgi
import pytest
from fake_engine import FakeEngine

from personae.api.app import create_app
from personae.api.console import history
from personae.api.console.history import KEPT, LiveHistory
from personae.api.console.live import history_sample

pytestmark = pytest.mark.anyio


async def test_a_sample_is_kept_at_once_and_then_every_minute_for_an_hour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[float] = []

    async def pass_time(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == KEPT + 10:
            done.set()
            await anyio.sleep_forever()

    done = anyio.Event()
    kept, number = LiveHistory(), iter(range(10**6))
    monkeypatch.setattr(history, "_sleep", pass_time)
    async with kept.running(lambda: b'{"n":%d' % next(number)):
        await done.wait()
    assert set(waited) == {60.0}
    assert kept.body().count(b'"at":') == KEPT
    assert b'{"n":9,' not in kept.body()
    assert b'{"n":10,' in kept.body()


async def test_a_sample_that_fails_is_logged_and_the_next_one_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done, kept, tries = anyio.Event(), LiveHistory(), []

    def sample() -> bytes:
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("broken")
        done.set()
        return b'{"n":1'

    monkeypatch.setattr(history, "_sleep", lambda seconds: anyio.lowlevel.checkpoint())
    async with kept.running(sample):
        await done.wait()
    assert "broken" in caplog.text
    assert b'"n":1' in kept.body()


async def test_the_history_has_what_the_charts_need(engine: FakeEngine) -> None:
    app = create_app(engine)
    async with asgi.client(app) as client:
        services = app.state.services
        services.history.add(history_sample(services))
        await client.post("/v1/completions", json={"model": "base", "prompt": "hi"})
        services.history.add(history_sample(services))
        before, after = (await client.get("/v1/stats/history")).json()["data"]
    assert after["at"] >= before["at"]

    def total(sample: dict[str, Any], name: str) -> float:
        return sum(one["value"] for one in sample["samples"].get(name, ()))

    assert total(after, "vllm:request_success_total") - total(before, "vllm:request_success_total") == 1
    assert total(after, "vllm:time_to_first_token_seconds_bucket") > 0
    assert len(str(after)) < 12_000
