"""Responses in the background over a restart of the server, and while it is full."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
from fake_engine import FakeEngine, byte_tokenizer
from tool_chat import TAGS, TEMPLATE
from virtual_clock import virtual_clock

from personae.api.app import create_app
from personae.api.responses.background import BackgroundResponses
from personae.api.responses.store import ResponseStore
from personae.api.tenants.data import DataDir
from personae.errors import Overloaded

pytestmark = virtual_clock
PATH = "/v1/responses"
ASKED: dict[str, Any] = {"model": "base", "input": "hi", "background": True}


def make_engine(**fields: Any) -> FakeEngine:
    return FakeEngine(tokenizer=byte_tokenizer(TEMPLATE, TAGS), max_model_len=4096, **fields)


@asynccontextmanager
async def started(path: Path, engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """A server on a data directory, until the block ends."""
    data = DataDir(path)
    store = ResponseStore(data)
    app = create_app(engine, stored=store)
    try:
        async with (
            BackgroundResponses(store).runs(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
        ):
            yield client
    finally:
        data.close()


async def until(client: httpx.AsyncClient, id: str, status: str) -> dict[str, Any]:
    for _ in range(10_000):
        found: dict[str, Any] = (await client.get(f"{PATH}/{id}")).json()
        assert found["status"] == status or found["status"] in ("queued", "in_progress"), found
        if found["status"] == status:
            return found
        await anyio.sleep(0.1)
    raise AssertionError(f"still {found}")


async def test_a_response_that_a_server_left_is_made_by_the_next_one(tmp_path: Path) -> None:
    async with started(tmp_path, make_engine(hold_after=2)) as client:
        begun = (await client.post(PATH, json=ASKED | {"instructions": "Be kind."})).json()
        await until(client, begun["id"], "in_progress")
    engine = make_engine()
    async with started(tmp_path, engine) as client:
        done = await until(client, begun["id"], "completed")
        items = (await client.get(f"{PATH}/{begun['id']}/input_items")).json()["data"]
    assert (done["id"], done["created_at"]) == (begun["id"], begun["created_at"])
    assert done["output"][0]["content"][0]["text"] == "Hello, world!"
    assert [item["content"][0]["text"] for item in items] == ["hi"]
    [log] = engine.submitted
    assert "Be kind." in engine.tokenizer.decode(log.tokens[: log.prompt_length], skip_special_tokens=False)
    engine = make_engine()
    async with started(tmp_path, engine) as client:
        assert (await until(client, begun["id"], "completed"))["output"] == done["output"]
    assert engine.submitted == []


async def test_a_response_waits_while_the_server_is_full(tmp_path: Path) -> None:
    engine = make_engine(refuse=Overloaded("full"))
    async with started(tmp_path, engine) as client:
        begun = (await client.post(PATH, json=ASKED)).json()
        await until(client, begun["id"], "in_progress")
        await anyio.sleep(30)
        engine.refuse = None
        done = await until(client, begun["id"], "completed")
    assert done["output"][0]["content"][0]["text"] == "Hello, world!"
