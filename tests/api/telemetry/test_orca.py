"""The load of the server in a header of its answers, for load balancers."""

import json

import pytest
from asgi import client
from fake_engine import FakeEngine

from personae.actors.client import EngineStats
from personae.api.app import create_app

pytestmark = pytest.mark.anyio
CHAT = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
LOAD = EngineStats(running=3, waiting=2, pages_total=200, pages_used=50)


async def load(wanted: str | None, **body: object) -> str | None:
    headers = {} if wanted is None else {"endpoint-load-metrics-format": wanted}
    async with client(create_app(FakeEngine(figures=LOAD))) as asking:
        answer = await asking.post("/v1/chat/completions", json=CHAT | body, headers=headers)
    assert answer.status_code == 200
    return answer.headers.get("endpoint-load-metrics")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_has_the_load_in_the_format_that_was_asked_for(stream: bool) -> None:
    text = await load("TEXT", stream=stream)
    assert text == (
        "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=2, "
        "named_metrics.num_requests_running=3"
    )
    kind, _, report = (await load("json", stream=stream) or "").partition(" ")
    assert kind == "JSON"
    assert json.loads(report) == {
        "named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 2, "num_requests_running": 3}
    }


@pytest.mark.parametrize("wanted", [None, "BIN", ""])
async def test_nobody_is_told_who_did_not_ask_for_a_format_that_is_known(wanted: str | None) -> None:
    assert await load(wanted) is None
