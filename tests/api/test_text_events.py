"""Events of plain text: what is around the text is encoded once, and no byte of the stream shows that."""

import re
from typing import Any

import asgi
import pytest
from fake_engine import FakeEngine

from personae.api.app import create_app
from personae.api.chat import ChatBuilder
from personae.api.completions import CompletionBuilder

pytestmark = pytest.mark.anyio

STRANGE = 'quote " \\ slash / tab \t\r\n nul \0 \x7f ls \u2028 naïve 日本語 🙂 </script> \\u0000'
ROUTES: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatBuilder, {"messages": [{"role": "user", "content": "hi"}]}),
    "/v1/completions": (CompletionBuilder, {"prompt": "hi"}),
}
ASKED: list[dict[str, Any]] = [
    {},
    {"n": 3, "seed": 1, "stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"return_token_ids": True},
    {"stop": ["日本"]},
    {"logprobs": 1},
]


@pytest.fixture
def anyio_backend() -> str:
    """asyncio: trio runs its tasks in a random order, so each run would gather other parts for an event."""
    return "asyncio"


async def streamed(route: str, fields: dict[str, Any]) -> bytes:
    """The bytes of an answer, without its id and time."""
    if route == "/v1/chat/completions" and "logprobs" in fields:
        fields = {**fields, "logprobs": True, "top_logprobs": 1}
    asked = {"model": "base", "stream": True, "max_tokens": 200, **ROUTES[route][1], **fields}
    visit = await asgi.Visit(route, asked).run(create_app(FakeEngine(answer=STRANGE)))
    assert visit.status == 200, visit.chunks
    return re.sub(rb'"id":"[^"]*","created":\d+|"id":"[^"]*"', b"", b"".join(visit.chunks))


@pytest.mark.parametrize("fields", ASKED, ids=lambda fields: "-".join(fields) or "plain")
@pytest.mark.parametrize("route", ROUTES)
async def test_a_stream_is_the_same_when_each_event_is_encoded_whole(
    route: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = await streamed(route, fields)
    monkeypatch.setattr(ROUTES[route][0], "event_of_text", lambda *_: None)
    assert await streamed(route, fields) == answer


@pytest.mark.parametrize("route", ROUTES)
async def test_only_the_first_and_the_last_part_of_plain_text_are_made_into_events(
    route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = ROUTES[route][0]
    parts, of = [], builder.of
    monkeypatch.setattr(builder, "of", lambda self, part: parts.append(part) or of(self, part))
    answer = await streamed(route, {})
    assert answer.count(b"data: ") > 20
    assert len([part for part in parts if part.words.text and part.finish is None]) <= 2
