"""When a stream's headers leave, and what keeps it alive while it waits."""

from typing import Any

import anyio
import asgi
import pytest
from fake_engine import FakeEngine
from starlette.applications import Starlette
from virtual_clock import virtual_clock

from personae.api.app import create_app
from personae.api.settings import ApiSettings
from personae.errors import GrammarError, Overloaded

pytestmark = [*virtual_clock, pytest.mark.usefixtures("no_threads")]
TALK = [{"role": "user", "content": "hi"}]
CHAT = {"model": "base", "messages": TALK, "stream": True}
ROUTES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "base", "prompt": "hi", "stream": True},
    "/v1/messages": CHAT | {"max_tokens": 9},
    "/v1/responses": {"model": "base", "input": "hi", "stream": True},
}
PING = b": ping\n\n"


async def after(
    seconds: float, app: Starlette, path: str = "/v1/chat/completions", body: dict[str, Any] = CHAT
) -> asgi.Visit:
    """What a client has got after so many seconds; then it leaves."""
    visit = asgi.Visit(path, body)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(visit.run, app)
        await anyio.sleep(seconds)
        got, status = list(visit.chunks), visit.status
        visit.leave()
    visit.chunks, visit.status = got, status
    return visit


@pytest.mark.parametrize("path", ROUTES)
async def test_headers_leave_before_the_first_token_and_comments_follow(path: str) -> None:
    app = create_app(FakeEngine(hold_prompt=True))
    early = await after(0.1, app, path, ROUTES[path])
    assert (early.status, early.chunks) == (200, [])
    assert early.headers["content-type"].startswith("text/event-stream")
    late = await after(46, app, path, ROUTES[path])
    assert late.chunks == [PING] * 3


async def test_comments_come_only_in_silence() -> None:
    app = create_app(FakeEngine(hold_after=3))
    visit = await after(31, app)
    assert visit.chunks[-2:] == [PING] * 2
    assert PING not in visit.chunks[:-2]
    assert len(visit.chunks) > 2


@pytest.mark.parametrize(("interval", "pings"), [(0.0, 0), (4.0, 7)])
async def test_the_interval_is_an_option(interval: float, pings: int) -> None:
    app = create_app(FakeEngine(hold_prompt=True), ApiSettings(stream_ping_interval=interval))
    visit = await after(30, app)
    assert (visit.status, visit.chunks) == (200, [PING] * pings)


@pytest.mark.parametrize(("error", "status"), [(Overloaded("full"), 503), (GrammarError("no"), 400)])
@pytest.mark.parametrize("path", ROUTES)
async def test_a_refusal_at_admission_has_a_status_of_its_own(
    path: str, error: Exception, status: int
) -> None:
    bound = {"structured_outputs": {"regex": "a+"}} if status == 400 else {}
    engine = FakeEngine()
    engine.refuse, engine.refuse_late = (error, None) if status == 503 else (None, error)
    visit = await asgi.Visit(path, ROUTES[path] | bound).run(create_app(engine))
    assert visit.status == status, visit.chunks
    assert visit.headers["content-type"] == "application/json"


async def test_what_waits_for_its_grammar_gets_its_headers_with_the_first_comment() -> None:
    app = create_app(FakeEngine(hold_prompt=True))
    bound = CHAT | {"structured_outputs": {"regex": "a+"}}
    early = await after(14, app, body=bound)
    assert (early.status, early.chunks) == (None, [])
    late = await after(31, app, body=bound)
    assert (late.status, late.chunks) == (200, [PING] * 2)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "bound",
    [
        {"structured_outputs": {"regex": "a+"}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"model": "team/pirate"},
        {"n": 2, "response_format": {"type": "json_object"}},
    ],
    ids=str,
)
async def test_what_is_bound_or_has_an_adapter_gets_its_headers_when_it_begins_to_run(bound: Any) -> None:
    visit = await after(0.1, create_app(FakeEngine(hold_begun=True)), body=CHAT | bound)
    assert (visit.status, b"error" in b"".join(visit.chunks)) == (200, False)


@pytest.mark.parametrize("path", ROUTES)
async def test_an_error_after_the_headers_is_an_event_of_the_api(path: str) -> None:
    app = create_app(FakeEngine(hold_prompt=True))
    visit = await asgi.Visit(path, ROUTES[path] | {"timeout": 20}).run(app)
    assert visit.status == 200
    assert visit.chunks.pop(0) == PING
    event = visit.events()[0]
    told = event["response"] if path == "/v1/responses" else event
    assert "time was over" in told["error"]["message"]
    if path == "/v1/messages":
        assert event["type"] == "error"
        assert event["error"]["type"] == "timeout_error"
