"""An answer that went on at an engine whose numbers differ says so, in its usage and in a header."""

from typing import Any

import msgspec
import pytest
from asgi import client
from fake_engine import FakeEngine, FakeStream

from personae.api.app import create_app

pytestmark = pytest.mark.anyio
ROUTES = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20},
}


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the answer has moved when each of its deltas comes."""
    planned: list[int] = []
    read = FakeStream.__anext__

    async def moved(self: FakeStream) -> Any:
        delta = await read(self)
        return msgspec.structs.replace(delta, moved=planned.pop(0)) if planned else delta

    monkeypatch.setattr(FakeStream, "__anext__", moved)
    return planned


@pytest.mark.parametrize("route", ROUTES)
async def test_an_answer_that_moved_between_classes_says_how_often(moves: list[int], route: str) -> None:
    app = create_app(FakeEngine())
    async with client(app) as asking:
        calm = await asking.post(f"/v1/{route}", json={"model": "base", **ROUTES[route]})
        moves += [0, 0, 1, 0, 1]
        moved = await asking.post(f"/v1/{route}", json={"model": "base", **ROUTES[route]})
    assert "personae" not in calm.json()["usage"]
    assert "x-personae-moved" not in calm.headers
    assert moved.json()["usage"]["personae"] == {"moved": 2}
    assert moved.headers["x-personae-moved"] == "2"


async def test_a_stream_says_so_in_its_usage(moves: list[int]) -> None:
    moves += [0, 0, 1]
    body = {"model": "base", **ROUTES["chat/completions"], "stream": True}
    async with client(create_app(FakeEngine())) as asking:
        answer = await asking.post(
            "/v1/chat/completions", json=body | {"stream_options": {"include_usage": True}}
        )
    assert '"personae":{"moved":1}' in answer.text
