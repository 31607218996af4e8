"""Latency targets and sessions, as headers."""

from typing import Any

import pytest
from asgi import client
from fake_engine import FakeEngine

from personae.api.app import create_app
from personae.engine.sequence import LatencyTargets

pytestmark = pytest.mark.anyio
CHAT = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


async def ask(engine: FakeEngine, headers: dict[str, str]) -> tuple[Any, str]:
    """The answer, and the metrics after it."""
    async with client(create_app(engine)) as asking:
        answer = await asking.post("/v1/chat/completions", json=CHAT, headers=headers)
        return answer, (await asking.get("/metrics")).text


async def test_targets_and_the_session_reach_the_engine() -> None:
    engine = FakeEngine()
    headers = {"x-slo-ttft-ms": "500", "x-slo-tpot-ms": "50.5", "x-slo-refuse": "true", "x-session-id": "s"}
    await ask(engine, headers)
    await ask(engine, {"x-session-id": "another"})
    first, second = engine.submitted
    assert first.targets == LatencyTargets(0.5, 0.0505, True)
    assert second.targets is None
    assert first.session != second.session
    assert len(first.session or "") == 32


async def test_one_engine_names_a_wish_to_be_refused_as_ignored() -> None:
    answer, _ = await ask(FakeEngine(), {"x-slo-ttft-ms": "1", "x-slo-refuse": "true"})
    assert (answer.status_code, answer.headers["x-personae-ignored"]) == (200, "x-slo-refuse")
    answer, _ = await ask(FakeEngine(), {"x-slo-ttft-ms": "1"})
    assert "x-personae-ignored" not in answer.headers


async def test_without_headers_a_request_has_neither() -> None:
    engine = FakeEngine()
    _, metrics = await ask(engine, {})
    assert (engine.submitted[0].targets, engine.submitted[0].session) == (None, None)
    assert "slo_requests_total{" not in metrics


@pytest.mark.parametrize(("first", "met"), [("3600000", "true"), ("0.0001", "false")])
async def test_a_metric_counts_the_answers_that_met_their_targets(first: str, met: str) -> None:
    _, metrics = await ask(FakeEngine(), {"x-slo-ttft-ms": first})
    assert f'personae:slo_requests_total{{met="{met}",model_name="base"}} 1.0' in metrics


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"x-slo-ttft-ms": "soon"}, "x-slo-ttft-ms"),
        ({"x-slo-ttft-ms": "0"}, "x-slo-ttft-ms"),
        ({"x-slo-ttft-ms": "nan"}, "x-slo-ttft-ms"),
        ({"x-slo-tpot-ms": "-1"}, "x-slo-tpot-ms"),
        ({"x-slo-tpot-ms": "1e12"}, "x-slo-tpot-ms"),
        ({"x-slo-refuse": "true"}, "x-slo-refuse"),
        ({"x-slo-tpot-ms": "5", "x-slo-refuse": "true"}, "x-slo-refuse"),
        ({"x-slo-ttft-ms": "5", "x-slo-refuse": "perhaps"}, "x-slo-refuse"),
        ({"x-session-id": ""}, "x-session-id"),
        ({"x-session-id": "s" * 257}, "x-session-id"),
    ],
)
async def test_a_header_that_is_wrong_is_refused_by_its_name(headers: dict[str, str], param: str) -> None:
    engine = FakeEngine()
    answer, _ = await ask(engine, headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not engine.submitted
