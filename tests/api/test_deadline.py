"""Requests that have a time."""

from collections.abc import Iterator
from typing import Any

import anyio
import asgi
import openai
import pytest
from fake_engine import FakeEngine
from live_server import serving
from starlette.applications import Starlette
from virtual_clock import virtual_clock

from personae.api.app import create_app
from personae.api.settings import ApiSettings

INLINE = [*virtual_clock, pytest.mark.usefixtures("no_threads")]
ASK = {"model": "base", "prompt": "hi"}
CHAT = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(hold_after=3)


async def visit(app: Starlette, body: dict[str, Any], header: str | None = None) -> tuple[asgi.Visit, float]:
    """The visit, and how long it took."""
    headers = [] if header is None else [(b"x-request-timeout", header.encode())]
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    begun = anyio.current_time()
    with anyio.fail_after(100):
        done = await asgi.Visit(path, body, headers=headers).run(app)
    return done, anyio.current_time() - begun


@pytest.mark.parametrize("body", [ASK, CHAT], ids=["completion", "chat"])
@pytest.mark.parametrize(
    ("seconds", "header", "limit", "after"),
    [(5, None, None, 5), (None, "7.5", None, 7.5), (9, "4", 6, 4), (9, "8", 6, 6), (3, "8", 6, 3)],
)
class TestWhoeverIsFirst:
    pytestmark = INLINE

    async def test_ends_the_request_with_a_504_and_frees_it(
        self,
        engine: FakeEngine,
        body: dict[str, Any],
        seconds: float | None,
        header: str | None,
        limit: float | None,
        after: float,
    ) -> None:
        app = create_app(engine, ApiSettings(request_timeout=limit))
        asked = body if seconds is None else body | {"timeout": seconds}
        done, took = await visit(app, asked, header)
        assert (done.status, done.error["code"], done.error["type"]) == (
            504,
            "deadline_exceeded",
            "timeout_error",
        )
        assert took == pytest.approx(after, abs=0.01)
        assert engine.live == set()
        assert done.headers["x-should-retry"] == "false"

    async def test_ends_a_stream_with_the_error_as_its_last_event(
        self,
        engine: FakeEngine,
        body: dict[str, Any],
        seconds: float | None,
        header: str | None,
        limit: float | None,
        after: float,
    ) -> None:
        app = create_app(engine, ApiSettings(request_timeout=limit))
        asked = body | {"stream": True} | ({} if seconds is None else {"timeout": seconds})
        done, took = await visit(app, asked, header)
        events = done.events()
        assert done.status == 200
        assert len(events) > 1, "what came before is delivered"
        assert events[-1]["error"]["code"] == "deadline_exceeded"
        assert took == pytest.approx(after, abs=0.01)
        assert engine.live == set()


class TestTimes:
    pytestmark = INLINE

    async def test_that_are_none_are_refused_by_name(self, engine: FakeEngine) -> None:
        app = create_app(engine)
        for value in (0, -1):
            done, _ = await visit(app, ASK | {"timeout": value})
            assert (done.status, done.error["param"]) == (400, "timeout")
        for text in ("0", "-3", "soon", "nan", ""):
            done, _ = await visit(app, ASK, text)
            assert (done.status, done.error["param"]) == (400, "x-request-timeout")
        assert engine.submitted == []

    async def test_that_suffice_change_nothing(self) -> None:
        done, _ = await visit(create_app(FakeEngine()), ASK | {"timeout": 5}, "inf")
        assert done.status == 200

    async def test_count_from_the_arrival_not_from_the_end_of_the_body(self, engine: FakeEngine) -> None:
        app = create_app(engine)
        slow = asgi.Visit("/v1/completions", headers=[(b"x-request-timeout", b"10")])

        async def send() -> None:
            await anyio.sleep(6)
            slow.say(b'{"model": "base", "prompt": "hi"}', more=False)

        begun = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            await slow.run(app)
        assert slow.status == 504
        assert anyio.current_time() - begun == pytest.approx(10, abs=0.01)


@pytest.fixture
def address(engine: FakeEngine) -> Iterator[str]:
    with serving(create_app(engine)) as address:
        yield address


def test_openais_client_does_not_ask_again(address: str, engine: FakeEngine) -> None:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=3) as client:
        with pytest.raises(openai.APIStatusError) as refused:
            client.completions.create(**ASK, extra_body={"timeout": 0.1})
        assert refused.value.status_code == 504
    assert len(engine.submitted) == 1
